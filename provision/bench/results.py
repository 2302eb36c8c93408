"""The results of `provision bench` as a document, those of earlier runs, and what has changed since the last one.

Every figure is the median of all rounds of all launches, with their quartiles, between which half of the rounds lie. Where the system puts
processes stays for a launch, so the quartiles of one launch say nothing about the next. A figure has changed if the two medians differ by
more than both spreads together, which cover the quartiles and the medians of the single launches: less can be chance.
"""

from __future__ import annotations

import hashlib
import statistics
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveInt, ValidationError
from pydantic.dataclasses import dataclass

from provision.base import downloads, paths
from provision.base.process_locks import acquired
from provision.base.text import counted, joined, size
from provision.base.validation import problems
from provision.inventory import Inventory
from provision.inventory.last_run import identity

MIN_ROUNDS = 4  # fewer have no quartiles
MIN_LAUNCHES = 2  # fewer say nothing about another launch
BUSY = 0.5  # load per core before the measurement
TOO_LOW = 1.2  # times a limit: who is faster than that has shown it to be none
WIDE = 1.5  # times the lower quartile: no speed to be compared with
MAX_RUNS = 10  # that are kept: the last may be damaged, or incomplete
_MAX_BYTES = 16 << 20  # of a document: 64 hosts have some 2 MB

Measured = Literal["network", "memory"]


@dataclass(frozen=True, config=ConfigDict(allow_inf_nan=False))
class Figure:
    """A median and its quartiles, None if there were too few rounds; and the median of each launch, as far as that was kept."""

    median: float
    low: float | None = None
    high: float | None = None
    launches: tuple[float, ...] = ()

    @property
    def spread(self) -> float | None:
        """How far the quartiles and the launches are apart; None without quartiles."""
        return None if self.low is None or self.high is None else max((self.high, *self.launches)) - min((self.low, *self.launches))

    @classmethod
    def of(cls, *launches: Sequence[float]) -> Figure:
        """The median and quartiles of values as measured in each launch."""
        values = [value for launch in launches for value in launch]
        medians = tuple(significant(statistics.median(launch)) for launch in launches)
        if len(values) < MIN_ROUNDS:
            return cls(significant(statistics.median(values)), launches=medians)
        low, median, high = map(significant, statistics.quantiles(values, n=4, method="inclusive"))
        return cls(median, low, high, medians)


def _positive(figure: Figure) -> Figure:
    if any(value is not None and value <= 0 for value in (figure.median, figure.low, figure.high, *figure.launches)):
        raise ValueError("must be greater than 0")
    return figure


class _Document(BaseModel):
    """Other versions may write more keys."""

    model_config = ConfigDict(frozen=True, defer_build=True, allow_inf_nan=False)


class Result(_Document):
    """An allreduce of one size: its time, and its bus bandwidth in gigabytes per second, as nccl-tests define it."""

    bytes: PositiveInt
    latency_us: Annotated[Figure, AfterValidator(_positive)]
    busbw_gbs: NonNegativeFloat

    @property
    def bandwidth(self) -> Figure:
        """The bus bandwidth with its quartiles: those of the times, the other way round."""
        moved = self.busbw_gbs * self.latency_us.median
        launches = tuple(moved / took for took in self.latency_us.launches)
        if self.latency_us.low is None or self.latency_us.high is None:
            return Figure(self.busbw_gbs, launches=launches)
        return Figure(self.busbw_gbs, moved / self.latency_us.high, moved / self.latency_us.low, launches)


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
        """Share of the limit that the largest size reaches, at most 1; None if the limit is unknown, or was measured too low.

        The engine can be somewhat faster than what was measured: it uses several connections. Then what it reached is the limit.
        """
        return min(1.0, self.largest.busbw_gbs / self.limit_gbs) if self.limit_gbs and not self.limit_too_low else None

    @property
    def limit_too_low(self) -> bool:
        """Whether the largest size was so much faster than the limit that it is none."""
        return bool(self.limit_gbs) and self.largest.busbw_gbs >= TOO_LOW * self.limit_gbs


class Pair(_Allreduce):
    """One rank on each of two hosts."""

    hosts: Sequence[str] = Field(min_length=2, max_length=2)


class Ranks(_Allreduce):
    """``np`` ranks on these hosts."""

    np: PositiveInt


class Training(_Document):
    """Training steps of ``np`` ranks. ``alone``: samples per second of the same processes without communication.

    ``efficiency``: how much of that is left, round by round; None for one rank, which has no peer.
    """

    np: PositiveInt
    hosts: Sequence[str] = Field(min_length=1)
    samples_per_second: Annotated[Figure, AfterValidator(_positive)]
    alone: Annotated[Figure, AfterValidator(_positive)]
    efficiency: Figure | None

    @property
    def share_left(self) -> Figure | None:
        """The efficiency; None for one rank, and above 100 % where no quartiles say whether that is noise."""
        share = self.efficiency
        return None if share is None or self.np == 1 or (share.median > 1 and share.low is None) else share

    @property
    def disturbed(self) -> bool:
        """Whether communication seems to make it faster, beyond the noise."""
        return self.share_left is not None and (self.share_left.low or 0) > 1


class HostSlots(_Document):
    """A host. ``load``: its load average of one minute before the measurement, on ``cores``; None where it did not say."""

    name: str
    slots: int
    load: NonNegativeFloat | None = None
    cores: PositiveInt | None = None

    @property
    def busy(self) -> bool:
        """Whether it was, before the measurement."""
        return self.load is not None and self.cores is not None and self.load > BUSY * self.cores


class Incomplete(_Document):
    """What ended the measurement early (``why``), after how many of how many launches, and what was not measured at all."""

    why: str
    launches: int
    planned: int
    missing: Sequence[str]


class Measurements(_Document):
    """The whole document. ``when`` is in ISO 8601."""

    schema_number: Literal[4] = Field(4, alias="schema")
    when: str
    hosts: Sequence[HostSlots]
    pairs: Sequence[Pair]
    ranks: Sequence[Ranks]
    training: Sequence[Training]
    incomplete: Incomplete | None = None

    @property
    def date(self) -> str:
        """When, for people: ``2026-11-26 22:38 UTC``."""
        return f"{self.when[:16].replace('T', ' ')} UTC"

    def of_linear(self, run: Training) -> Figure | None:
        """The speed next to that of one rank times the number of ranks, with its quartiles.

        None where one rank's speed is nothing to compare with: it was not measured, its quartiles are far apart or unknown, or more ranks
        are faster than linear beyond the noise.
        """
        one, speed = next((each.samples_per_second for each in self.training if each.np == 1), Figure(0)), run.samples_per_second
        if one.low is None or one.high is None or one.high > WIDE * one.low or speed.low is None or speed.high is None:
            return None
        if run.np == 1:
            return Figure(1.0)
        share = Figure(speed.median / run.np / one.median, speed.low / run.np / one.high, speed.high / run.np / one.low)
        return None if (share.low or 0) > 1 else share


def remarks(measurements: Measurements) -> Iterator[str]:
    """What to know before one reads the figures, a sentence each."""
    if ended := measurements.incomplete:
        lacks = f"not measured: {', '.join(ended.missing)}" if ended.missing else "every figure is there, some of fewer launches"
        yield f"incomplete: {ended.launches} of {ended.planned} launches; {lacks}"
    if busy := [f"{host.name} (load {number(host.load or 0)} on {host.cores} cores)" for host in measurements.hosts if host.busy]:
        yield f"hosts were busy before the measurement: {joined(busy)}; figures are lower and spread more"
    if disturbed := [run for run in measurements.training if run.disturbed]:
        ranks = joined([str(run.np) for run in disturbed])
        yield f"training with {ranks} ranks was faster with communication than without: busy hosts disturbed the measurement"
    low = [*(" – ".join(pair.hosts) for pair in measurements.pairs if pair.limit_too_low)]
    low += [f"{run.np} ranks" for run in measurements.ranks if run.limit_too_low]
    if low:
        why = "arrays stay in caches, one connection does not fill the link, or the hosts were busy"
        yield f"the limit was measured too low for {joined(low)} ({why}): no share of it is given"


def significant(value: float) -> float:
    """Four significant digits: more are noise."""
    return float(f"{value:.4g}")


def read(content: bytes) -> Measurements:
    """The document in a file's content. Raises ValueError, with the reason, for anything else."""
    if len(content) > _MAX_BYTES:
        raise ValueError(f"it has more than {_MAX_BYTES >> 20} MiB")
    try:
        return Measurements.model_validate_json(content)
    except ValidationError as error:
        raise ValueError(problems(error)[0][1]) from error


class History(NamedTuple):
    """Earlier runs of a cluster, the oldest first; and files that cannot be read, a line each with the reason."""

    runs: list[Measurements]
    unreadable: list[str]


def history(inventory: Inventory) -> History:
    """What `keep` has kept of this cluster."""
    runs: list[Measurements] = []
    unreadable = []
    for path in _kept(_folder(inventory)):
        try:
            runs.append(read(path.read_bytes()))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            unreadable.append(f"{path}: not compared: {error}")
    return History(runs, unreadable)


def keep(inventory: Inventory, measurements: Measurements) -> None:
    """Keep the measurements for later comparisons."""
    folder = _folder(inventory)
    with acquired(folder / ".lock", wait=10):  # another bench may end at the same time: each gets a number of its own
        kept = _kept(folder)
        number = int(kept[-1].stem) + 1 if kept else 1
        downloads.store(folder / f"{number:06}.json", (measurements.model_dump_json(by_alias=True, indent=1) + "\n").encode())
        for path in kept[: -MAX_RUNS + 1]:
            path.unlink(missing_ok=True)


def _kept(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.json") if path.stem.isdecimal())


def _folder(inventory: Inventory) -> Path:
    # A subset of the hosts (`--limit`) is another cluster and is not compared with the whole one.
    words = [identity(inventory), *sorted(host.name for host in inventory.hosts)]
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


LeftOut = Literal["launches", "spread", "partner"]  # which one of the two runs lacks
_LEFT_OUT: dict[LeftOut, str] = {
    "launches": f"one launch is not enough to tell a change; both runs need --repetitions {MIN_LAUNCHES} or more",
    "spread": "too few rounds for a spread in one of the two runs",
    "partner": "that run did not measure them, or on other hosts",
}


class Comparison(NamedTuple):
    """The figures of two runs that have changed, the worst first.

    Attributes:
        before: the earlier run.
        now: the later one.
        compared: how many were.
        left_out: why others were not (`_LEFT_OUT`) → how many.
    """

    before: Measurements
    now: Measurements
    changes: list[Change]
    compared: int
    left_out: Mapping[LeftOut, int]

    @property
    def remarks(self) -> list[str]:
        """What was compared and what not, and why, a sentence each."""
        found = []
        if self.compared and not self.changes:
            found.append(f"no change in {_counted(self.compared)} that exceeds the spread of both runs")
        if self.changes and any(host.busy for run in (self.before, self.now) for host in run.hosts):
            found.append("hosts were busy before one of the two runs: the changes may come from that")
        return found + [f"{_counted(self.left_out[why])} not compared: {said}" for why, said in _LEFT_OUT.items() if why in self.left_out]


def _counted(count: int) -> str:
    return counted(count, "figure")


def compare(before: Measurements, now: Measurements) -> Comparison:
    """What has changed by more than both spreads together."""
    known = {each.key: each.figure for each in figures(before)}
    changes, compared, left_out = [], 0, Counter[LeftOut]()
    for key, name, unit, figure in figures(now):
        old = known.get(key)
        if old is None:
            left_out["partner"] += 1
        elif min(len(old.launches), len(figure.launches)) < MIN_LAUNCHES:
            left_out["launches"] += 1
        elif old.spread is None or figure.spread is None:
            left_out["spread"] += 1
        else:
            compared += 1
            if abs(figure.median - old.median) > old.spread + figure.spread:
                better = old.median / figure.median if unit == "µs" else figure.median / old.median
                changes.append(Change(name, old.median, figure.median, better, unit))
    return Comparison(before, now, sorted(changes, key=lambda change: change.better), compared, left_out)


def compare_with_last(earlier: Sequence[Measurements], now: Measurements) -> Comparison | None:
    """The same with the last earlier run, of those that were completed if there are any; None without one."""
    before = next((run for run in reversed(earlier) if run.incomplete is None), earlier[-1] if earlier else None)
    return compare(before, now) if before else None


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
        yield Named(("training", where), f"training, {counted(training.np, 'rank')}", "samples/s", training.samples_per_second)


def _of_allreduce(title: str, run: _Allreduce, where: Hashable) -> Iterator[Named]:
    smallest, largest = run.smallest, run.largest
    yield Named((where, smallest.bytes, "µs"), f"{title}, {size(smallest.bytes)}", "µs", smallest.latency_us)
    if largest.busbw_gbs:
        yield Named((where, largest.bytes, "GB/s"), f"{title}, {size(largest.bytes)}", "GB/s", largest.bandwidth)


def _placement(measurements: Measurements, run: Ranks | Training) -> Hashable:
    """The hosts of the ranks and how many each had: each is filled before the next."""
    slots = {host.name: host.slots for host in measurements.hosts}
    return run.np, tuple((name, slots.get(name)) for name in run.hosts[:-1]), run.hosts[-1]


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:.3g}" if value < 999.5 else f"{float(f'{value:.3g}'):,.0f}"
