"""Streams logs and collects where each signature matches. What follows from what is decided elsewhere (judge.py).

A candidate line (prefilter.py) is looked at together with its neighbours, because programs print messages over several lines, and
people fold them: first with the neighbours of the same rank, then with all. The candidates of a block are looked at together, so that
each pattern is searched once where several of them ask for it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import BinaryIO

from provision.diagnosis.logs.lines import Line, clean
from provision.diagnosis.logs.literals import required
from provision.diagnosis.logs.prefilter import Prefilter
from provision.diagnosis.logs.unknown import MARKERS
from provision.diagnosis.patterns import Pattern
from provision.diagnosis.signatures import Signature

BLOCK = 1 << 20  # bytes read at once
BEHIND, AHEAD = 12, 16  # lines around a candidate that a message may take
NEAR = 1 << 13  # bytes of them on each side
LONGEST_LINE = 1 << 18  # bytes; what is longer is cut into lines of this size
KEPT_HITS = 100  # of one signature; all further ones are only counted
TRIES = 60  # looks at lines that are alike but for their digits, before they are taken to be what they were so far


@dataclass(frozen=True)
class Hit:
    """A match: lines ``first`` to ``last`` (from 1) of file number ``file``."""

    file: int
    first: int
    last: int
    text: str
    rank: str | None


@dataclass
class Found:
    """All that was seen of one signature."""

    hits: list[Hit] = field(default_factory=list)
    times: int = 0

    def add(self, hit: Hit) -> None:
        if self.hits and any(hit.file == other.file and hit.first == other.first for other in self.hits[-20:]):
            return
        self.times += 1
        if len(self.hits) < KEPT_HITS:
            self.hits.append(hit)


@dataclass(frozen=True, eq=False)
class _Rule:
    pattern: Pattern
    kind: str  # signature, recovery, harmless, unknown
    id: str
    words: tuple[tuple[bytes, ...], ...]  # of each group one must stand near the candidate; the first is the one it was found by

    @classmethod
    def of(cls, pattern: Pattern, kind: str, name: str) -> _Rule:
        return cls(pattern, kind, name, tuple(tuple(word.encode() for word in group) for group in required(pattern)))

    @property
    def only_here(self) -> bool:
        """Whether a match must begin on the candidate line."""
        return self.kind in ("unknown", "recovery")

    def possible(self, near: bytes) -> bool:
        for group in self.words:  # no generators: this is done for each line with a word
            for word in group:
                if word in near:
                    break
            else:
                return False
        return True


class Scanner:
    """Feeds on logs one after the other and remembers what it found.

    Attributes:
        files: labels of the logs, in the order they were read.
        found: signature id → where.
        unknown: marker → where an error stands that no signature claims.
        recovered: signature id → last line (file, line) that says that it went well after all.
    """

    def __init__(self, signatures: Iterable[Signature], harmless: Sequence[Pattern]) -> None:
        rules = [_Rule.of(pattern, "harmless", "") for pattern in harmless]
        for signature in signatures:
            rules += [_Rule.of(pattern, "signature", signature.id) for pattern in signature.patterns]
            rules += [_Rule.of(pattern, "recovery", signature.id) for pattern in signature.recovered_by]
        rules += [_Rule.of(pattern, "unknown", name) for name, pattern in MARKERS.items()]
        self._harmless = [rule for rule in rules if rule.kind == "harmless"]
        self._rules = [rule for rule in rules if rule.kind != "harmless"]
        self._rules_of: dict[bytes, list[int]] = defaultdict(list)
        for number, rule in enumerate(self._rules):
            for word in rule.words[0]:
                self._rules_of[word].append(number)
        self._prefilter = Prefilter(word for rule in rules for word in rule.words[0])
        self._tries: dict[bytes, int] = defaultdict(int)
        self.files: list[str] = []
        self.found: dict[str, Found] = defaultdict(Found)
        self.unknown: dict[str, Found] = defaultdict(Found)
        self.recovered: dict[str, tuple[int, int]] = {}

    def read(self, stream: BinaryIO, label: str) -> None:
        """Read one log to its end. Memory does not grow with its length."""
        self.files.append(label)
        carry = b""
        number = 1  # of the first line in the block
        fresh = 0  # index of the first line that has not been looked at
        while True:
            data = stream.read(BLOCK)
            block = _without_endless_lines(carry + data)
            raw = block.split(b"\n")
            # The last lines wait for what follows them; without more data they are looked at as they are.
            done = len(raw) if not data else max(fresh, len(raw) - 1 - AHEAD)
            reduced = self._prefilter.reduced(block)
            candidates = [
                (index, words)
                for index, words in self._prefilter.candidates(reduced)
                if fresh <= index < done and self._is_worth_a_look(reduced[index])
            ]
            if candidates:
                self._look(raw, reduced, candidates, number)
            if not data:
                return
            keep = max(0, done - BEHIND)
            carry = b"\n".join(raw[keep:])
            number += keep
            fresh = done - keep

    def _is_worth_a_look(self, line: bytes) -> bool:
        self._tries[line] += 1
        if self._tries[line] <= TRIES:
            return True
        self._prefilter.forget(line)
        self._tries.pop(line)
        return False

    def _look(self, raw: list[bytes], reduced: list[bytes], candidates: Sequence[tuple[int, tuple[bytes, ...]]], number: int) -> None:
        starts = list(accumulate((len(line) + 1 for line in raw), initial=0))
        looks: list[tuple[int, int, int, list[_Rule]]] = []
        lines: dict[int, Line] = {}
        for index, words in candidates:
            begin = max(index - BEHIND, bisect_left(starts, starts[index] - NEAR))
            end = min(index + AHEAD, bisect_right(starts, starts[index + 1] + NEAR) - 1)
            near = b"\n".join(reduced[begin:end])
            numbers = {each for word in words for each in self._rules_of.get(word, ())}
            if rules := [rule for rule in map(self._rules.__getitem__, sorted(numbers)) if rule.possible(near)]:
                cleaned = looks[-1][2] if looks else 0
                lines.update((at, clean(raw[at])) for at in range(max(begin, cleaned), end))
                looks.append((index, begin, end, rules))
        everything = _Text(lines)
        of_rank: dict[str | None, dict[int, Line]] = defaultdict(dict)
        for at, line in lines.items():
            of_rank[line.rank][at] = line
        alike = {rank: everything if len(of_rank) == 1 else _Text(its) for rank, its in of_rank.items()}
        asked = []
        for index, begin, end, rules in looks:
            windows = [_Window(alike[lines[index].rank], index, begin, end)]
            if windows[0].size < end - begin:
                windows.append(_Window(everything, index, begin, end))
            asked.append(windows)
            for rule in rules:
                for window in windows:
                    window.ask(rule)
        harmless = [rule for rule in self._harmless if any(text.holds(rule) for text in {everything, *alike.values()})]
        for (_, begin, end, rules), windows in zip(looks, asked, strict=True):
            hits = [(rule, span) for rule in rules if (span := _match(rule, windows))]
            if hits and harmless:  # also where it begins on another line
                near = b"\n".join(reduced[begin:end])
                if any(rule.possible(near) and _match(rule, windows) for rule in harmless):
                    continue
            for rule, (first, last) in hits:
                self._add(rule, Hit(len(self.files) - 1, number + first, number + last, lines[first].text, lines[first].rank))

    def _add(self, rule: _Rule, hit: Hit) -> None:
        if rule.kind == "signature":
            self.found[rule.id].add(hit)
        elif rule.kind == "unknown":
            self.unknown[rule.id].add(hit)
        else:
            self.recovered[rule.id] = (hit.file, hit.first)


class _Text:
    """Lines as one text. A pattern is searched once in all of it that anybody asks for.

    Patterns are anchored at line ends at most, so that a part of whole lines has the matches that it has as a text of its own, unless
    one reaches over its edge.
    """

    def __init__(self, lines: Mapping[int, Line]) -> None:
        self.numbers = list(lines)
        self.starts = list(accumulate((len(line.letters) + 1 for line in lines.values()), initial=0))
        self._text = b"\n".join(line.letters for line in lines.values())
        self._asked: dict[_Rule, list[tuple[int, int]]] = defaultdict(list)
        self._known: dict[_Rule, list[tuple[int, int]]] = {}

    def holds(self, rule: _Rule) -> bool:
        """Whether the pattern matches anywhere."""
        return any(True for _ in rule.pattern.spans(self._text))

    def ask(self, rule: _Rule, begin: int, end: int) -> None:
        """This part will be wanted; the parts come in the order in which they begin."""
        parts = self._asked[rule]
        if parts and begin <= parts[-1][1]:
            before = parts.pop()
            begin, end = before[0], max(before[1], end)
        parts.append((begin, end))

    def spans(self, rule: _Rule, begin: int, end: int) -> Iterable[tuple[int, int]]:
        """The matches in this part."""
        if rule in self._asked:
            self._known[rule] = [span for part in self._asked.pop(rule) for span in rule.pattern.spans(self._text, *part)]
        known = self._known.get(rule)
        if known is not None:
            first, behind = bisect_left(known, (begin,)), bisect_left(known, (end,))
            if not (first and known[first - 1][1] > begin) and not (behind and known[behind - 1][1] > end):
                return known[first:behind]
        return rule.pattern.spans(self._text, begin, end)


class _Window:
    """Neighbouring lines in a text, in which matches are looked for that touch the line in question."""

    def __init__(self, text: _Text, index: int, begin: int, end: int) -> None:
        first, here, behind = (bisect_left(text.numbers, number) for number in (begin, index, end))
        self.size = behind - first
        self._text = text
        self._begin, self._end = text.starts[first], text.starts[behind] - 1
        self._here, self._behind = text.starts[here], text.starts[here + 1] - 1

    def ask(self, rule: _Rule) -> None:
        self._text.ask(rule, self._here if rule.only_here else self._begin, self._end)

    def match(self, rule: _Rule) -> tuple[int, int] | None:
        """(first, last) line of the first match that touches the line."""
        for first, behind in self._text.spans(rule, self._here if rule.only_here else self._begin, self._end):
            if first > self._behind:
                return None
            if behind > self._here or first == self._here:
                return self._line_at(first), self._line_at(max(first, behind - 1))
        return None

    def _line_at(self, offset: int) -> int:
        return self._text.numbers[bisect_right(self._text.starts, offset) - 1]


def _match(rule: _Rule, windows: Iterable[_Window]) -> tuple[int, int] | None:
    for window in windows:
        if span := window.match(rule):
            return span
    return None


def _without_endless_lines(block: bytes) -> bytes:
    """A line without end, as binary files have, is cut, so that it cannot fill the memory."""
    tail = block.rfind(b"\n") + 1
    if len(block) - tail <= LONGEST_LINE:
        return block
    pieces = [block[at : at + LONGEST_LINE] for at in range(tail, len(block), LONGEST_LINE)]
    return block[:tail] + b"\n".join(pieces)
