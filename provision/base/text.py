"""Groups, and lists of names, counts, sizes and durations, in sentences."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
_NUMBER = re.compile(r"(?<![0-9])[0-9]{1,9}(?![0-9])")


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """(what items have in common, item) … → what they have in common, each with its items, both in their order."""
    found: dict[K, list[V]] = {}
    for shared, item in pairs:
        found.setdefault(shared, []).append(item)
    return found


def joined(names: Sequence[str]) -> str:
    """``a``, ``a, b and c``, or ``a, b and 48 more``; ``none`` of none."""
    if len(names) > 3:
        return f"{names[0]}, {names[1]} and {len(names) - 2} more"
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names) or "none"


def few(names: Sequence[str], most: int = 6, separator: str = ", ") -> str:
    """The first names, and how many more there are."""
    return separator.join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def counted(count: int, noun: str) -> str:
    """``1 host``, ``2 hosts``."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def folded(names: Sequence[str]) -> str:
    """All names, those that differ in one number only as one: ``node[1-3,7]``, ``login``, ``gpu[08-11].rack2.lan``."""
    around = {name: [(name[: at.start()], name[at.end() :]) for at in _NUMBER.finditer(name)] for name in names}
    alike = Counter(key for keys in around.values() for key in keys)
    groups: dict[tuple[str, str], list[str]] = {}
    for name in names:
        keys = around[name]
        # Of several numbers the one in which most names differ; the last where none does.
        before, after = max(reversed(keys), key=alike.__getitem__) if keys else (name, "")
        groups.setdefault((before, after), []).append(name[len(before) : len(name) - len(after)])
    return ", ".join(f"{before}{_ranges(numbers)}{after}" for (before, after), numbers in groups.items())


def shortened(names: Sequence[str], longest: int = 32) -> str:
    """The names in few words: ``node[1-4]``, or ``a, b and 98 more`` where that has more than ``longest`` characters."""
    text = folded(names)
    return text if len(text) <= longest else joined(names)


def _ranges(numbers: Sequence[str]) -> str:
    """``[1-3,7]``; one number, or no name with one, as it is."""
    if len(numbers) == 1:
        return numbers[0]
    is_padded = any(number.startswith("0") and number != "0" for number in numbers)
    spans: list[tuple[str, str]] = []
    for number in sorted(numbers, key=lambda number: (len(number), number)):
        last = spans[-1][1] if spans else ""
        if last and int(number) == int(last) + 1 and (len(number) == len(last) or not is_padded):
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    return f"[{','.join(first if first == last else f'{first}-{last}' for first, last in spans)}]"


def size(count: float) -> str:
    """A number of bytes: ``1.5 MiB``."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.4g} {name}"
    return f"{count:g} B"


def clock(seconds: float) -> str:
    """``0:07``, ``12:30`` or ``1:02:03``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def duration(seconds: float) -> str:
    """``8.2 s``, ``1 min 27 s``, ``2 h 3 min`` or ``2 d 4 h``; ``unknown`` for what cannot be one, such as a record's."""
    if not 0 <= seconds < 1e9:
        return "unknown"
    if seconds < 9.95:
        return f"{seconds:.1f}".removesuffix(".0") + " s"
    whole = round(seconds)
    for size, unit, part, name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size} {unit}" + (f" {rest} {name}" if rest else "")
    return f"{whole} s"


def about(seconds: float) -> str:
    """A duration that is not known exactly: ``10 s``, ``2 min``, ``1 h 20 min``."""
    return duration(max(5, round(seconds / 5) * 5) if seconds < 60 else round(seconds / 60) * 60)
