"""Version numbers as the field writes them: ``4.1.8``, ``2.9.0-1``, ``2.13.0+cpu``, ``3.11``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any


@cache
def key(version: str) -> tuple[int, ...]:
    """The numbers of the upstream version, for comparing: epoch, Debian revision and local part do not count."""
    upstream = version.split(":", 1)[-1].split("+", 1)[0].split("-", 1)[0]
    numbers = re.findall(r"\d+", upstream)
    if not numbers:
        raise ValueError(f"no number in version {version!r}")
    return tuple(int(number) for number in numbers)


def package_key(version: str) -> tuple[int, ...]:
    """All numbers of a package's version, without an epoch: of the same release that of the larger revision or CUDA is newer."""
    return tuple(int(number) for number in re.findall(r"\d+", version.rpartition(":")[2]))


def matches(version: str, entry: Mapping[str, Any]) -> bool:
    """Whether a catalogue entry covers ``version``: ``versions: […]``, ``from: …`` with ``to: …`` (both included) or ``below: …``.

    ``2.16`` in ``versions`` and ``to`` stands for all of 2.16.
    """
    if "versions" in entry:
        return any(key(version)[: len(key(listed))] == key(listed) for listed in entry["versions"])
    if "from" in entry:
        return key(entry["from"]) <= key(version) and key(version)[: len(key(entry["to"]))] <= key(entry["to"])
    return key(version) < key(str(entry["below"]))


def troubles(version: str, entries: Iterable[Mapping[str, Any]]) -> list[str]:
    """What a catalogue's list knows against ``version``, each with its source, in the list's order."""
    found = [entry for entry in entries if matches(version, entry)]
    return [f"{entry['why']} ({entry['source']}{'' if entry.get('confirmed', True) else '; not confirmed'})" for entry in found]


def minor(version: str) -> str:
    """``3.11.2`` → ``3.11``."""
    return ".".join(str(number) for number in key(version)[:2])
