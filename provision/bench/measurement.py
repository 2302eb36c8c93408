"""Measurements on hosts, one after the other, by the engine's own benchmark (``benchmarks/engine``), which is copied there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

from provision.base import resources
from provision.base.errors import ProvisionError
from provision.bench.results import HostSlots, Measurements, Pair, Ranks, Result, Training
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
    """``sizes``: bytes, as the engine's benchmark takes them. ``pairs``, ``training``: whether to measure these. ``rounds``: of each."""

    sizes: str = "4K,64K,1M,16M"
    pairs: bool = True
    training: bool = True
    rounds: int = 5


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
    """Run all experiments on the hosts.

    Raises:
        ProvisionError: a host cannot be used, or a measurement failed.
        Interrupted: after Ctrl-C, when the current measurement has been ended.
    """
    session = Session(inventory, progress, passwords, command="provision bench")
    try:
        plan = installed.read_plan(session)
        slots = [(name, host.slots) for name, host in plan.hosts.items()]
        planned = experiments(slots, pairs=options.pairs, training=options.training and all(host.torch for host in plan.hosts.values()))
        modules = {path: f"{_PACKAGE}/{path.name}" for path in sorted((resources.folder("benchmarks") / "engine").glob("*.py"))}
        training_job.copy_files(session, plan, modules, "the benchmark")
        found: list[Pair | Ranks | Training] = []
        for number, experiment in enumerate(planned, 1):
            log = session.folder / f"bench-{number}.log"
            report = _run(session, plan, experiment, options, f"{number} of {len(planned)}: {experiment.title}", log)
            found.append(outcome(experiment, report))
        measurements = Measurements(
            when=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            hosts=[HostSlots(name=name, slots=count) for name, count in slots],
            pairs=[each for each in found if isinstance(each, Pair)],
            ranks=[each for each in found if isinstance(each, Ranks)],
            training=[each for each in found if isinstance(each, Training)],
        )
        session.write("bench.json", measurements.model_dump(by_alias=True))
        return measurements
    finally:
        session.close()


def outcome(experiment: Experiment, report: Mapping[str, Any]) -> Pair | Ranks | Training:
    """What is kept of the engine's own report."""
    if experiment.kind == "training":
        speeds = {result["engine"]: result["samples_per_second"] for result in report["results"]}
        ours, alone = speeds["collective_core"], speeds["none"]
        efficiency = round(ours / alone, 4)
        return Training(np=experiment.ranks, hosts=experiment.hosts, samples_per_second=ours, alone=alone, efficiency=efficiency)
    in_arena = sorted((result for result in report["results"] if result["memory"] == "arena"), key=lambda result: result["bytes"])
    results = [Result(bytes=each["bytes"], median_us=each["median_us"], busbw_gbs=each["busbw_gbs"]) for each in in_arena]
    if experiment.kind == "pair":
        return Pair(hosts=experiment.hosts, results=results, limit_gbs=report["limit_gbs"])
    return Ranks(np=experiment.ranks, hosts=experiment.hosts, results=results, limit_gbs=report["limit_gbs"])


def _run(session: Session, plan: Plan, experiment: Experiment, options: BenchOptions, title: str, log: Path) -> dict[str, Any]:
    hosts = {name: plan.hosts[name] for name in experiment.hosts}
    where = launchers.Environment.of(replace(plan, hosts=hosts))
    folder = f"{next(iter(hosts.values())).prefix}/smoke"
    placed = [(hosts[name].network.address, count) for name, count in experiment.placement]
    command = ["python", "-m", _PACKAGE, "--peers", "none", "--rounds", str(options.rounds), "--report", "{job}/report.json"]
    command += ["--train", "mnist"] if experiment.kind == "training" else ["--sizes", options.sizes]
    job = launchers.own_job(where, placed, launchers.RunOptions(tuple(command), workdir=folder, report="report.json"))
    result = jobs.run(session, job, title, log, lambda _line: None)
    if result.interrupted:
        session.abort()
    if result.report is None or result.code:
        raise ProvisionError(jobs.no_report(result, job, log), where=", ".join(hosts), hint=f"read {log}")
    return result.report
