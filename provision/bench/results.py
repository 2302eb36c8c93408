"""The results of `provision bench` as a document, those of the previous run, and what has changed since then."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from provision.base import downloads, paths
from provision.inventory import Inventory
from provision.inventory.last_run import identity

NOISE = 0.1  # measurements differ by this share anyway


class _Document(BaseModel):
    """Other versions may write more keys."""

    model_config = ConfigDict(frozen=True, defer_build=True)


class Result(_Document):
    """An allreduce of one size. ``busbw_gbs``: gigabytes per second of bus bandwidth, as nccl-tests define it."""

    bytes: int
    median_us: float
    busbw_gbs: float


class Pair(_Document):
    """One rank on each of two hosts. ``results`` are in the order of their sizes; ``limit_gbs``: what the link can do; 0 if unknown."""

    hosts: Sequence[str]
    results: Sequence[Result]
    limit_gbs: float


class Ranks(_Document):
    """``np`` ranks on these hosts; the rest as of a pair."""

    np: int
    hosts: Sequence[str]
    results: Sequence[Result]
    limit_gbs: float


class Training(_Document):
    """Training steps of ``np`` ranks. ``alone``: samples per second of the same processes without communication."""

    np: int
    hosts: Sequence[str]
    samples_per_second: float
    alone: float
    efficiency: float


class HostSlots(_Document):
    name: str
    slots: int


class Measurements(_Document):
    """The whole document. ``when`` is in ISO 8601."""

    schema_number: Literal[1] = Field(1, alias="schema")
    when: str
    hosts: Sequence[HostSlots]
    pairs: Sequence[Pair]
    ranks: Sequence[Ranks]
    training: Sequence[Training]


def previous(inventory: Inventory) -> Measurements | None:
    """The last measurements of this cluster; None where there are none, or they cannot be read any more."""
    try:
        return Measurements.model_validate_json(_file(inventory).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def keep(inventory: Inventory, measurements: Measurements) -> None:
    """Keep the measurements for the next comparison."""
    file = _file(inventory)
    file.parent.mkdir(parents=True, exist_ok=True)
    downloads.store(file, (measurements.model_dump_json(by_alias=True, indent=1) + "\n").encode())


def _file(inventory: Inventory) -> Path:
    # A subset of the hosts (`--limit`) is another cluster and does not replace the whole one's measurements.
    words = [identity(inventory), *sorted(host.name for host in inventory.hosts)]
    name = hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]
    return paths.home() / "bench" / f"{name}.json"


class Change(NamedTuple):
    """A figure before and now. ``better`` is the ratio of the two: above 1 it has improved."""

    what: str
    before: float
    now: float
    better: float

    def __str__(self) -> str:
        return f"{self.what}: {self.before:g} → {self.now:g} ({self.better - 1:+.0%})"


def changes(before: Measurements, now: Measurements) -> list[Change]:
    """The figures of both that have changed by more than noise, the worst first."""
    known = dict(_figures(before))
    found = []
    for what, value in _figures(now):
        old = known.get(what)
        if old and value:
            better = old / value if what.endswith(" us") else value / old
            if abs(better - 1) > NOISE:
                found.append(Change(what, old, value, better))
    return sorted(found, key=lambda change: change.better)


def _figures(measurements: Measurements) -> Iterator[tuple[str, float]]:
    """Every figure with its name; those that end in `` us`` are times, the others speeds."""
    for pair in measurements.pairs:
        yield from _of_allreduce(" – ".join(pair.hosts), pair.results)
    for run in measurements.ranks:
        yield from _of_allreduce(f"{run.np} ranks", run.results)
    for training in measurements.training:
        yield f"training, {training.np} ranks, samples/s", training.samples_per_second


def _of_allreduce(title: str, results: Sequence[Result]) -> Iterator[tuple[str, float]]:
    if results:
        yield f"{title}, {results[0].bytes} bytes, us", results[0].median_us
        yield f"{title}, {results[-1].bytes} bytes, GB/s", results[-1].busbw_gbs
