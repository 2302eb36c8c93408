"""The results of `provision bench` as a document, those of earlier runs, and what has changed since the last one.

Every figure is the median of all rounds of all repetitions, and its spread the inter-quartile range, in which half of the rounds lie.
A figure has changed if the two medians differ by more than both spreads together: less can be chance.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError

from provision.base import downloads, paths
from provision.base.process_locks import acquired
from provision.inventory import Inventory
from provision.inventory.last_run import identity

MIN_ROUNDS = 4  # fewer have no quartiles
MOST_RUNS = 100  # that are kept and compared
_MOST_BYTES = 16 << 20  # of a document: 64 hosts have some 2 MB

Measured = Literal["network", "memory"]


class _Document(BaseModel):
    """Other versions may write more keys."""

    model_config = ConfigDict(frozen=True, defer_build=True, allow_inf_nan=False)


class Result(_Document):
    """An allreduce of one size. ``busbw_gbs``: gigabytes per second of bus bandwidth, as nccl-tests define it.

    ``low_us``, ``high_us``: the quartiles of the rounds; None if there were too few.
    """

    bytes: PositiveInt
    median_us: PositiveFloat
    low_us: PositiveFloat | None = None
    high_us: PositiveFloat | None = None
    busbw_gbs: NonNegativeFloat

    @property
    def bandwidth(self) -> Figure:
        """The bus bandwidth with its quartiles: those of the times, the other way round."""
        if self.low_us is None or self.high_us is None:
            return Figure(self.busbw_gbs)
        return Figure(self.busbw_gbs, self.busbw_gbs * self.median_us / self.high_us, self.busbw_gbs * self.median_us / self.low_us)

    @property
    def latency(self) -> Figure:
        """The time in microseconds with its quartiles."""
        return Figure(self.median_us, self.low_us, self.high_us)


class _Allreduce(_Document):
    """Allreduces on some hosts. ``results`` are in the order of their sizes.

    ``limit_gbs``: what was measured without the engine, 0 if unknown; ``limit_of``: between hosts plain TCP both ways at once, inside a
    host a copy in memory by all ranks at once.
    """

    hosts: Sequence[str] = Field(min_length=1)
    results: Sequence[Result] = Field(min_length=1)
    limit_gbs: NonNegativeFloat
    limit_of: Measured = "network"

    @property
    def smallest(self) -> Result:
        return self.results[0]

    @property
    def largest(self) -> Result:
        return self.results[-1]

    @property
    def of_limit(self) -> float | None:
        """Share of the limit that the largest size reaches, at most 1; None if unknown.

        The engine can be faster than what was measured: it uses several connections, and small arrays stay in caches. Then what it reached
        is the limit.
        """
        return min(1.0, self.largest.busbw_gbs / self.limit_gbs) if self.limit_gbs else None


class Pair(_Allreduce):
    """One rank on each of two hosts."""

    hosts: Sequence[str] = Field(min_length=2, max_length=2)


class Ranks(_Allreduce):
    """``np`` ranks on these hosts."""

    np: PositiveInt


class Training(_Document):
    """Training steps of ``np`` ranks. ``alone``: samples per second of the same processes without communication."""

    np: PositiveInt
    hosts: Sequence[str] = Field(min_length=1)
    samples_per_second: PositiveFloat
    low: PositiveFloat | None = None
    high: PositiveFloat | None = None
    alone: PositiveFloat
    efficiency: NonNegativeFloat

    @property
    def speed(self) -> Figure:
        """Samples per second with their quartiles."""
        return Figure(self.samples_per_second, self.low, self.high)


class HostSlots(_Document):
    name: str
    slots: int


class Measurements(_Document):
    """The whole document. ``when`` is in ISO 8601. Schema 1 had no quartiles."""

    schema_number: Literal[1, 2] = Field(2, alias="schema")
    when: str
    hosts: Sequence[HostSlots]
    pairs: Sequence[Pair]
    ranks: Sequence[Ranks]
    training: Sequence[Training]

    @property
    def date(self) -> str:
        """When, for people: ``2026-11-26 22:38 UTC``."""
        return f"{self.when[:16].replace('T', ' ')} UTC"


class Figure(NamedTuple):
    """A median and its quartiles; None if there were too few rounds."""

    median: float
    low: float | None = None
    high: float | None = None

    @property
    def spread(self) -> float | None:
        """The inter-quartile range."""
        return None if self.low is None or self.high is None else self.high - self.low

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        """The median and quartiles of values as measured."""
        if len(values) < MIN_ROUNDS:
            return cls(significant(statistics.median(values)))
        low, median, high = map(significant, statistics.quantiles(values, n=4, method="inclusive"))
        return cls(median, low, high)


def significant(value: float) -> float:
    """Four significant digits: more are noise."""
    return float(f"{value:.4g}")


def read(content: bytes) -> Measurements:
    """The document in a file's content. Raises ValueError, with the reason, for anything else."""
    if len(content) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES >> 20} MiB")
    try:
        return Measurements.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


class History(NamedTuple):
    """Earlier runs of a cluster, the oldest first; and files that cannot be read, a line each with the reason."""

    runs: list[Measurements]
    unreadable: list[str]


def history(inventory: Inventory) -> History:
    """What `keep` has kept of this cluster."""
    return history_of(identity(inventory), [host.name for host in inventory.hosts])


def history_of(inventory: str, hosts: Iterable[str]) -> History:
    """The same for hosts of an inventory, as reports record it."""
    folder = _folder(inventory, hosts)
    runs: list[Measurements] = []
    unreadable = []
    for path in [folder.with_suffix(".json"), *_kept(folder)]:  # the first: how schema 1 was kept
        try:
            runs.append(read(path.read_bytes()))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            unreadable.append(f"{path}: not compared: {error}")
    return History(runs, unreadable)


def keep(inventory: Inventory, measurements: Measurements) -> None:
    """Keep the measurements for later comparisons."""
    folder = _folder(identity(inventory), [host.name for host in inventory.hosts])
    with acquired(folder / ".lock", wait=10):  # another bench may end at the same time: each gets a number of its own
        kept = _kept(folder)
        number = int(kept[-1].stem) + 1 if kept else 1
        downloads.store(folder / f"{number:06}.json", (measurements.model_dump_json(by_alias=True, indent=1) + "\n").encode())
        for path in kept[: -MOST_RUNS + 1]:
            path.unlink(missing_ok=True)


def _kept(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.json") if path.stem.isdecimal())


def _folder(inventory: str, hosts: Iterable[str]) -> Path:
    # A subset of the hosts (`--limit`) is another cluster and is not compared with the whole one.
    words = [inventory, *sorted(hosts)]
    return paths.home() / "bench" / hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]


class Change(NamedTuple):
    """A figure before and now. ``better`` is the ratio of the two: above 1 it has improved."""

    what: str
    before: float
    now: float
    better: float
    unit: str

    def __str__(self) -> str:
        verdict = "better" if self.better > 1 else "worse"
        return f"{self.what}: {number(self.before)} → {number(self.now)} {self.unit} ({self.now / self.before - 1:+.0%}, {verdict})"


class Comparison(NamedTuple):
    """The figures of two runs that have changed, the worst first.

    Attributes:
        compared: how many were.
        without_spread: how many lack a spread in one of the runs.
        without_partner: how many the run before has not measured, or on other hosts.
    """

    changes: list[Change]
    compared: int
    without_spread: int
    without_partner: int


def compare(before: Measurements, now: Measurements) -> Comparison:
    """What has changed by more than both spreads together."""
    known = {each.key: each.figure for each in figures(before)}
    changes, compared, without, alone = [], 0, 0, 0
    for key, name, unit, figure in figures(now):
        old = known.get(key)
        if old is None:
            alone += 1
            continue
        if old.spread is None or figure.spread is None:
            without += 1
            continue
        compared += 1
        if abs(figure.median - old.median) > old.spread + figure.spread:
            better = old.median / figure.median if unit == "µs" else figure.median / old.median
            changes.append(Change(name, old.median, figure.median, better, unit))
    return Comparison(sorted(changes, key=lambda change: change.better), compared, without, alone)


class Named(NamedTuple):
    """A figure with its name. ``key``: what was measured, and where; figures with the same can be compared."""

    key: tuple[Hashable, ...]
    name: str
    unit: str
    figure: Figure


def figures(measurements: Measurements) -> Iterator[Named]:
    """Every figure; microseconds are times, the others speeds."""
    for pair in measurements.pairs:
        yield from _of_allreduce(" – ".join(pair.hosts), pair, frozenset(pair.hosts))
    for run in measurements.ranks:
        yield from _of_allreduce(f"{run.np} ranks", run, _placement(measurements, run))
    for training in measurements.training:
        where = _placement(measurements, training)
        yield Named(("training", where), f"training, {training.np} rank{'s' * (training.np != 1)}", "samples/s", training.speed)


def _of_allreduce(title: str, run: _Allreduce, where: Hashable) -> Iterator[Named]:
    smallest, largest = run.smallest, run.largest
    yield Named((where, smallest.bytes, "µs"), f"{title}, {size(smallest.bytes)}", "µs", smallest.latency)
    if largest.busbw_gbs:
        yield Named((where, largest.bytes, "GB/s"), f"{title}, {size(largest.bytes)}", "GB/s", largest.bandwidth)


def _placement(measurements: Measurements, run: Ranks | Training) -> Hashable:
    """The hosts of the ranks and how many each had: each is filled before the next."""
    slots = {host.name: host.slots for host in measurements.hosts}
    return run.np, tuple((name, slots.get(name)) for name in run.hosts[:-1]), run.hosts[-1]


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:.3g}" if value < 999.5 else f"{float(f'{value:.3g}'):,.0f}"


def size(count: float) -> str:
    """A number of bytes in words: ``1 MiB``."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:g} {name}"
    return f"{count:g} B"
