"""What the Xids in a log mean: the numbers are in the lines, their meaning in the catalogue (gpu_health.yaml), as for `doctor --gpu`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from provision import catalog
from provision.base.problems import SEVERITIES
from provision.catalog.models import KnownXid
from provision.diagnosis.patterns import Pattern

ANY = "xid-any"  # the id of the known error that stands for all Xids without an entry of their own
_NUMBER = Pattern(r"(?i).*?Xid.{0,60}?: (\d{1,4})\b")


def known() -> Iterator[tuple[int, KnownXid]]:
    """All Xids that the catalogue knows, in the order of their numbers."""
    return iter(sorted((int(number), entry) for number, entry in catalog.gpu_health().xids.known.items()))


def details(lines: Iterable[str], fix: tuple[str, ...]) -> dict[str, Any]:
    """What a finding of Xids in these lines says instead of the entry: their severity, and one step for each before those of ``fix``."""
    entries = dict(known())
    numbers = dict.fromkeys(int(found.group(1)) for line in lines if (found := _NUMBER.match(line)))
    steps = (
        f"Xid {number}: {entries[number].meaning}: {entries[number].remedy}"
        if number in entries
        else f"Xid {number}: not in the catalogue: https://docs.nvidia.com/deploy/xid-errors"
        for number in numbers
    )
    severities = [entries[number].severity if number in entries else "warning" for number in numbers]
    return {"severity": min(severities, key=SEVERITIES.index, default="error"), "fix": (*steps, *fix)}
