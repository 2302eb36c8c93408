"""Measurements on hosts, one after the other, by the engine's own benchmark (``benchmarks/engine``), which is copied there."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from itertools import combinations
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, ValidationError

from provision.base import resources
from provision.base.errors import ProvisionError, UsageError, as_provision_error
from provision.base.text import counted
from provision.base.validation import problems
from provision.bench.results import Figure, HostSlots, Incomplete, Measured, Measurements, Pair, Ranks, Result, Training, significant
from provision.inventory import Inventory
from provision.launch import jobs, launchers
from provision.launch.smoke import training_job
from provision.plan.model import Plan
from provision.remote import ssh
from provision.remote.progress import Progress
from provision.remote.session import Session
from provision.survey import installed

_PACKAGE = "engine_benchmark"  # what the benchmark is called on the hosts
_LOAD = f"echo; echo {ssh.ANSWER}; cat /proc/loadavg && grep -c ^processor /proc/cpuinfo"  # both of the machine, also in a container
_LONGEST_REASON = 10_000  # letters that are recorded


@dataclass(frozen=True)
class BenchOptions:
    """``sizes``: bytes, as the engine's benchmark takes them. ``pairs``, ``training``: whether to measure these.

    ``repetitions``: how often each is started, because where the system puts processes stays for a launch; ``rounds``: of each launch.
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
        return f"{what} of {counted(self.ranks, 'rank')} on {counted(len(self.hosts), 'host')}"


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


def measure(
    inventory: Inventory, options: BenchOptions, progress: Progress, passwords: Mapping[str, str]
) -> tuple[Measurements, ProvisionError | None]:
    """Run all experiments on the hosts, then all of them again, so that a repetition sees the hosts at another time.

    Returns:
        What was measured, and what ended that early, if anything: a launch that failed, or Ctrl-C.

    Raises:
        ProvisionError: a host cannot be used, or the first launch failed.
        Interrupted: after Ctrl-C before the end of the first launch.
    """
    measurements: Measurements | None = None
    try:
        with Session(inventory, progress, passwords, command="provision bench") as session:
            plan = installed.read_plan(session)
            slots = [(name, host.slots) for name, host in plan.hosts.items()]
            planned = experiments(slots, pairs=options.pairs, training=options.training and all(host.torch for host in plan.hosts.values()))
            modules = {path: f"{_PACKAGE}/{path.name}" for path in sorted((resources.folder("benchmarks") / "engine").glob("*.py"))}
            if not planned:
                hint = "give the host more slots (slots=N in the inventory), name more hosts, or leave out --no-training and --no-pairs"
                raise UsageError("there is nothing to measure: one rank alone, without training steps", hint=hint)
            hosts = _hosts(session, slots)  # before they work for us
            training_job.copy_files(session, plan, modules, "the benchmark")
            reports: dict[Experiment, list[EngineReport]] = {experiment: [] for experiment in planned}
            launches = [experiment for _ in range(options.repetitions) for experiment in planned]
            try:
                with session.progress.series("Measure", len(launches)):
                    for number, experiment in enumerate(launches, 1):
                        report = _run(session, plan, experiment, options, session.folder / f"bench-{number}.log")
                        outcome(experiment, [*reports[experiment], report])  # at once: what is wrong is not found after hours
                        reports[experiment].append(report)
                measurements = _document(hosts, reports, None)
            except (ProvisionError, KeyboardInterrupt) as error:
                if any(reports.values()):
                    measurements = _document(hosts, reports, _incomplete(error, reports, len(launches)))
                raise
            finally:
                if measurements is not None:
                    session.write("bench.json", measurements.model_dump(by_alias=True))
    except ProvisionError as error:
        if measurements is None:
            raise
        return measurements, error
    return measurements, None


def _hosts(session: Session, slots: Sequence[tuple[str, int]]) -> list[HostSlots]:
    """The hosts with their load, as far as they say it."""
    answers = ssh.run(session, {name: _LOAD for name, _ in slots})
    found = []
    for name, count in slots:
        words = answers[name].body.split()
        try:
            found.append(HostSlots(name=name, slots=count, load=float(words[0]), cores=int(words[-1])))
        except (ValueError, IndexError):  # another system, or too busy to answer
            found.append(HostSlots(name=name, slots=count))
    return found


def _document(
    hosts: Sequence[HostSlots], reports: Mapping[Experiment, Sequence[EngineReport]], incomplete: Incomplete | None
) -> Measurements:
    found = [outcome(experiment, each) for experiment, each in reports.items() if each]
    return Measurements(
        when=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        hosts=hosts,
        pairs=[each for each in found if isinstance(each, Pair)],
        ranks=[each for each in found if isinstance(each, Ranks)],
        training=[each for each in found if isinstance(each, Training)],
        incomplete=incomplete,
    )


def _incomplete(error: BaseException, reports: Mapping[Experiment, Sequence[EngineReport]], planned: int) -> Incomplete:
    why = "\n".join(text for text, _ in as_provision_error(error).parts())
    missing = [experiment.title for experiment, each in reports.items() if not each]
    return Incomplete(why=why[:_LONGEST_REASON], launches=sum(map(len, reports.values())), planned=planned, missing=missing)


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
        speed, without = (Figure.of(*([samples / took for took in launch] for launch in side)) for side in (ours, alone))
        # Round by round: what else the hosts do meanwhile slows both sides of a round down.
        launches = zip(ours, alone, strict=True)
        left = Figure.of(*([free / took for took, free in zip(*launch, strict=False)] for launch in launches))
        return Training(
            np=experiment.ranks,
            hosts=experiment.hosts,
            samples_per_second=speed,
            alone=without,
            efficiency=left if experiment.ranks > 1 else None,
        )
    results = []
    for count in sorted({row.bytes for report in reports for row in report.results if row.bytes is not None}):
        took = Figure.of(*_rounds(experiment, reports, "collective_core", "arena", count))
        # As nccl-tests define it: bytes per second, times 2 (n-1)/n.
        bus = count / took.median / 1e3 * 2 * (experiment.ranks - 1) / experiment.ranks
        results.append(Result(bytes=count, latency_us=took, busbw_gbs=significant(bus)))
    limit = significant(statistics.median(report.limit_gbs for report in reports))
    of: Measured = "memory" if reports[0].network_gbs_each_way is None else "network"
    if experiment.kind == "pair":
        return Pair(hosts=experiment.hosts, results=results, limit_gbs=limit, limit_of=of)
    return Ranks(np=experiment.ranks, hosts=experiment.hosts, results=results, limit_gbs=limit, limit_of=of)


def _rounds(experiment: Experiment, reports: Sequence[EngineReport], side: str, memory: str, count: int | None) -> list[list[float]]:
    """The rounds of each launch."""
    found = [row for report in reports for row in report.results if (row.engine, row.memory, row.bytes) == (side, memory, count)]
    if len(found) != len(reports):
        raise ProvisionError(f"the benchmark's report lacks {side}", where=experiment.title, hint="run it again; --debug shows more")
    return [row.rounds_us for row in found]


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
    return ProvisionError(f"the benchmark's report cannot be read: {problems(error)[0][1]}", where=where, hint=hint)
