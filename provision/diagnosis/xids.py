"""What the Xids in a log mean: the numbers are in the lines, their meaning in the catalogue (gpu_health.yaml), as for `doctor --gpu`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from provision.base.problems import SEVERITIES, Severity
from provision.catalog import Catalog
from provision.catalog.models import KnownXid
from provision.diagnosis.patterns import Pattern

ANY = "xid-any"  # the id of the known error that stands for all Xids without an entry of their own
_NUMBER = Pattern(r"(?i).*?Xid.{0,60}?(?:: |=)(\d{1,4})\b")


def known(catalog: Catalog) -> Iterator[tuple[int, KnownXid]]:
    """All Xids that the catalogue knows, in the order of their numbers."""
    return iter(sorted((int(number), entry) for number, entry in catalog.gpu_health().xids.of.items()))


def judged(lines: Iterable[str], catalog: Catalog) -> tuple[Severity, tuple[str, ...]]:
    """The severity of the Xids in these lines, and a step for each."""
    numbers = dict.fromkeys(int(found[1]) for line in lines if (found := _NUMBER.match(line)))
    entries = {number: dict(known(catalog)).get(number) for number in numbers}
    unknown = "not in the catalogue: https://docs.nvidia.com/deploy/xid-errors"
    steps = tuple(f"Xid {number}: {f'{xid.meaning}: {xid.remedy}' if xid else unknown}" for number, xid in entries.items())
    severities: list[Severity] = [xid.severity if xid else "warning" for xid in entries.values()]
    return min(severities, key=SEVERITIES.index, default="error"), steps
