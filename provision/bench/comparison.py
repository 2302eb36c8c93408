"""The figures of this run next to those of the one before. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

#: Changes below this share are what measurements differ by anyway.
NOISE = 0.1


class Change(NamedTuple):
    """What is measured, before and now, and now next to before as a share: above 1 it has become better."""

    what: str
    before: float
    now: float
    better: float

    def __str__(self) -> str:
        return f"{self.what}: {self.before:g} → {self.now:g} ({self.better - 1:+.0%})"


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """What both have measured and what has changed by more than noise, the worst first."""
    known = dict(figures(before))
    found = []
    for what, value in figures(now):
        old = known.get(what)
        if old and value:
            better = old / value if what.endswith(" us") else value / old
            if abs(better - 1) > NOISE:
                found.append(Change(what, old, value, better))
    return sorted(found, key=lambda change: change.better)


def figures(document: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Every figure with its name; names that end in `` us`` are times, the others speeds."""
    for pair in document["pairs"]:
        yield from _of_results(" – ".join(pair["hosts"]), pair["results"])
    for run in document["ranks"]:
        yield from _of_results(f"{run['np']} ranks", run["results"])
    for run in document["training"]:
        yield f"training, {run['np']} ranks, samples/s", run["samples_per_second"]


def _of_results(where: str, results: list[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    if results:
        yield f"{where}, {results[0]['bytes']} bytes, us", results[0]["median_us"]
        yield f"{where}, {results[-1]['bytes']} bytes, GB/s", results[-1]["busbw_gbs"]
