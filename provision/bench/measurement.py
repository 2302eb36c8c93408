"""Measurements on hosts, one after the other, by the engine's own benchmark (``benchmarks/engine``), which is copied there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from itertools import combinations
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, ValidationError

from provision.base import resources
from provision.base.errors import ProvisionError, UsageError
from provision.bench.results import Figure, HostSlots, Measured, Measurements, Pair, Ranks, Result, Training, significant
from provision.inventory import Inventory
from provision.launch import jobs, launchers
from provision.plan.model import Plan
from provision.remote.progress import Progress
from provision.remote.session import Session
from provision.smoke import training_job
from provision.survey import installed

_PACKAGE = "engine_benchmark"  # what the benchmark is called on the hosts


@dataclass(frozen=True)
class BenchOptions:
    """``sizes``: bytes, as the engine's benchmark takes them. ``pairs``, ``training``: whether to measure these.

    ``repetitions``: how often each is started anew, because where the system puts processes stays for a launch; ``rounds``: of each launch.
    """

    sizes: str = "4K,64K,1M,16M"
    pairs: bool = True
    training: bool = True
    rounds: int = 3
    repetitions: int = 3


@dataclass(frozen=True)
class Experiment:
    """One run: host → ranks, in order. A ``pair`` has one rank on each of two hosts."""

    kind: Literal["pair", "ranks", "training"]
    placement: tuple[tuple[str, int], ...]

    @property
    def ranks(self) -> int:
        return sum(count for _, count in self.placement)

    @property
    def hosts(self) -> list[str]:
        return [name for name, _ in self.placement]

    @property
    def title(self) -> str:
        if self.kind == "pair":
            return " and ".join(self.hosts)
        what = "training steps" if self.kind == "training" else "allreduce"
        return f"{what} of {self.ranks} rank{'s' * (self.ranks > 1)} on {len(self.hosts)} host{'s' * (len(self.hosts) > 1)}"


_Microseconds = Annotated[float, Field(gt=1e-6, lt=1e12)]
_Count = Annotated[int, Field(gt=0, lt=1 << 50)]


class _Row(BaseModel):
    """A side of the engine's own report, with one size of an allreduce or with training steps."""

    engine: str
    memory: str = ""
    bytes: _Count | None = None
    rounds_us: list[_Microseconds] = Field(min_length=1, max_length=100_000)


class EngineReport(BaseModel):
    """What the engine's benchmark writes, as far as it is read here. ``batch``: samples per rank and training step."""

    results: list[_Row] = Field(min_length=1, max_length=10_000)
    limit_gbs: float = Field(0.0, ge=0, lt=1e9)
    network_gbs_each_way: float | None = None
    batch: _Count = 1


def experiments(slots: Sequence[tuple[str, int]], *, pairs: bool, training: bool) -> list[Experiment]:
    """What to measure on hosts with so many slots each: every pair of hosts, then 1, 2, 4 … and all ranks."""
    planned = []
    if pairs:
        planned += [Experiment("pair", ((one, 1), (other, 1))) for one, other in combinations([name for name, _ in slots], 2)]
    total = sum(count for _, count in slots)
    for ranks in [*(1 << power for power in range(total.bit_length()) if 1 << power < total), total]:
        if ranks > 1:
            planned.append(Experiment("ranks", _placement(slots, ranks)))
        if training:
            planned.append(Experiment("training", _placement(slots, ranks)))
    return planned


def _placement(slots: Sequence[tuple[str, int]], ranks: int) -> tuple[tuple[str, int], ...]:
    """The ranks of each host, each filled before the next."""
    placement = []
    for name, count in slots:
        if here := min(count, ranks):
            placement.append((name, here))
        ranks -= here
    return tuple(placement)


def measure(inventory: Inventory, options: BenchOptions, progress: Progress, passwords: Mapping[str, str]) -> Measurements:
    """Run all experiments on the hosts, then all of them again, so that a repetition sees the hosts at another time.

    Raises:
        ProvisionError: a host cannot be used, or a measurement failed.
        Interrupted: after Ctrl-C, when the current measurement has been ended.
    """
    with Session(inventory, progress, passwords, command="provision bench") as session:
        plan = installed.read_plan(session)
        slots = [(name, host.slots) for name, host in plan.hosts.items()]
        planned = experiments(slots, pairs=options.pairs, training=options.training and all(host.torch for host in plan.hosts.values()))
        modules = {path: f"{_PACKAGE}/{path.name}" for path in sorted((resources.folder("benchmarks") / "engine").glob("*.py"))}
        if not planned:
            hint = "give the host more slots (slots=N in the inventory), name more hosts, or leave out --no-training and --no-pairs"
            raise UsageError("there is nothing to measure: one rank alone, without training steps", hint=hint)
        training_job.copy_files(session, plan, modules, "the benchmark")
        reports: dict[Experiment, list[EngineReport]] = {}
        outcomes: dict[Experiment, Pair | Ranks | Training] = {}
        launches = [experiment for _ in range(options.repetitions) for experiment in planned]
        with session.progress.series("Measure", len(launches)):
            for number, experiment in enumerate(launches, 1):
                report = _run(session, plan, experiment, options, session.folder / f"bench-{number}.log")
                reports.setdefault(experiment, []).append(report)
                outcomes[experiment] = outcome(experiment, reports[experiment])  # at once: what is wrong is not found after hours
        found = outcomes.values()
        measurements = Measurements(
            when=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            hosts=[HostSlots(name=name, slots=count) for name, count in slots],
            pairs=[each for each in found if isinstance(each, Pair)],
            ranks=[each for each in found if isinstance(each, Ranks)],
            training=[each for each in found if isinstance(each, Training)],
        )
        session.write("bench.json", measurements.model_dump(by_alias=True))
        return measurements


def outcome(experiment: Experiment, reports: Sequence[EngineReport]) -> Pair | Ranks | Training:
    """What is kept of the engine's own reports: the median and quartiles of the rounds of all launches.

    Raises:
        ProvisionError: a side is missing in a report, or a figure is none.
    """
    try:
        return _outcome(experiment, reports)
    except ValidationError as error:
        raise _unreadable(error, experiment.title, "run it again; --debug shows more") from error


def _outcome(experiment: Experiment, reports: Sequence[EngineReport]) -> Pair | Ranks | Training:
    if experiment.kind == "training":
        ours, alone = (_rounds(experiment, reports, side, "", None) for side in ("collective_core", "none"))
        samples = 1e6 * experiment.ranks * reports[0].batch
        speed = Figure.of([samples / took for took in ours])
        without = Figure.of([samples / took for took in alone]).median
        return Training(
            np=experiment.ranks,
            hosts=experiment.hosts,
            samples_per_second=speed.median,
            low=speed.low,
            high=speed.high,
            alone=without,
            efficiency=significant(speed.median / without),
        )
    results = []
    for count in sorted({row.bytes for report in reports for row in report.results if row.bytes is not None}):
        took = Figure.of(_rounds(experiment, reports, "collective_core", "arena", count))
        # As nccl-tests define it: bytes per second, times 2 (n-1)/n.
        bus = count / took.median / 1e3 * 2 * (experiment.ranks - 1) / experiment.ranks
        results.append(Result(bytes=count, median_us=took.median, low_us=took.low, high_us=took.high, busbw_gbs=significant(bus)))
    limit = Figure.of([report.limit_gbs for report in reports]).median
    of: Measured = "memory" if reports[0].network_gbs_each_way is None else "network"
    if experiment.kind == "pair":
        return Pair(hosts=experiment.hosts, results=results, limit_gbs=limit, limit_of=of)
    return Ranks(np=experiment.ranks, hosts=experiment.hosts, results=results, limit_gbs=limit, limit_of=of)


def _rounds(experiment: Experiment, reports: Sequence[EngineReport], side: str, memory: str, count: int | None) -> list[float]:
    found = [row for report in reports for row in report.results if (row.engine, row.memory, row.bytes) == (side, memory, count)]
    if len(found) != len(reports):
        raise ProvisionError(f"the benchmark's report lacks {side}", where=experiment.title, hint="run it again; --debug shows more")
    return [took for row in found for took in row.rounds_us]


def _run(session: Session, plan: Plan, experiment: Experiment, options: BenchOptions, log: Path) -> EngineReport:
    hosts = {name: plan.hosts[name] for name in experiment.hosts}
    where = launchers.Environment.of(replace(plan, hosts=hosts))
    folder = f"{next(iter(hosts.values())).prefix}/smoke"
    placed = [(hosts[name].network.address, count) for name, count in experiment.placement]
    command = ["python", "-m", _PACKAGE, "--peers", "none", "--rounds", str(options.rounds), "--report", "{job}/report.json"]
    command += ["--train", "mnist"] if experiment.kind == "training" else ["--sizes", options.sizes]
    job = launchers.own_job(where, placed, launchers.RunOptions(tuple(command), workdir=folder, report="report.json"))
    result = jobs.run(session, job, experiment.title, log, lambda _line: None)
    if result.interrupted:
        session.abort()
    if result.report is None or result.code:
        raise ProvisionError(jobs.no_report(result, job, log), where=", ".join(hosts), hint=f"read {log}")
    try:
        return EngineReport.model_validate(result.report)
    except ValidationError as error:
        raise _unreadable(error, ", ".join(hosts), f"read {log}") from error


def _unreadable(error: ValidationError, where: str, hint: str) -> ProvisionError:
    first = error.errors()[0]
    return ProvisionError(
        f"the benchmark's report cannot be read: {'.'.join(map(str, first['loc']))}: {first['msg']}", where=where, hint=hint
    )
