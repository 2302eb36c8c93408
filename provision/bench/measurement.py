"""Runs the measurements on the hosts, one after the other, with the engine's own benchmark, and gathers what it says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from provision.base.errors import ProvisionError
from provision.bench import experiments
from provision.bench.experiments import Experiment
from provision.inventory import Inventory
from provision.launch import jobs
from provision.plan.model import Plan
from provision.remote.progress import Progress
from provision.remote.session import Session
from provision.survey import installed

SCHEMA = 1


@dataclass(frozen=True)
class Wanted:
    """``sizes`` in bytes as the engine's benchmark takes them, ``pairs`` and ``training``: whether to measure these, and rounds of each."""

    sizes: str = "4K,64K,1M,16M"
    pairs: bool = True
    training: bool = True
    rounds: int = 5


def measure(inventory: Inventory, wanted: Wanted, progress: Progress, passwords: Mapping[str, str]) -> dict[str, Any]:
    """The document of `provision bench`.

    ``{"schema": 1, "when": …, "hosts": [{"name", "slots"}], "pairs": [{"hosts": [a, b], "results": […], "limit_gbs": …}],
    "ranks": [{"np", "hosts", "results": […], "limit_gbs"}], "training": [{"np", "hosts", "samples_per_second", "alone", "efficiency"}]}``;
    a result has ``bytes``, ``median_us`` and ``busbw_gbs`` (gigabytes per second of bus bandwidth, as nccl-tests define it).

    Raises:
        ProvisionError: a host cannot be used, or a measurement failed.
        Interrupted: after Ctrl-C, when the measurement under way has been ended.
    """
    session = Session(inventory, progress, passwords)
    try:
        plan = installed.read_plan(session)
        training = wanted.training and all(host.torch for host in plan.hosts.values())
        slots = [(name, host.slots) for name, host in plan.hosts.items()]
        document: dict[str, Any] = {
            "schema": SCHEMA,
            "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "hosts": [{"name": name, "slots": count} for name, count in slots],
            "pairs": [],
            "ranks": [],
            "training": [],
        }
        planned = experiments.of(slots, pairs=wanted.pairs, training=training)
        for number, experiment in enumerate(planned, 1):
            log = session.folder / f"bench-{number}.log"
            said = _run(session, plan, experiment, wanted, f"{number} of {len(planned)}: {experiment.title}", log)
            place = {"pair": "pairs", "ranks": "ranks", "training": "training"}[experiment.kind]
            document[place].append(entry(experiment, said))
        session.write("bench.json", document)
        return document
    finally:
        session.close()


def entry(experiment: Experiment, said: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of the engine's own document on one measurement."""
    hosts = [name for name, _ in experiment.placed]
    if experiment.kind == "training":
        speeds = {result["engine"]: result["samples_per_second"] for result in said["results"]}
        ours, alone = speeds["collective_core"], speeds["none"]
        return {"np": experiment.ranks, "hosts": hosts, "samples_per_second": ours, "alone": alone, "efficiency": round(ours / alone, 4)}
    in_arena = sorted((result for result in said["results"] if result["memory"] == "arena"), key=lambda result: result["bytes"])
    results = [{name: result[name] for name in ("bytes", "median_us", "busbw_gbs")} for result in in_arena]
    found = {"hosts": hosts, "results": results, "limit_gbs": said["limit_gbs"]}
    return found if experiment.kind == "pair" else {"np": experiment.ranks, **found}


def words_of(experiment: Experiment, wanted: Wanted) -> list[str]:
    """The engine's benchmark for it, as a command."""
    words = ["python", "-m", "collective_core.bench", "--peers", "none", "--rounds", str(wanted.rounds), "--report", "{job}/report.json"]
    return [*words, *(["--train", "mnist"] if experiment.kind == "training" else ["--sizes", wanted.sizes])]


def _run(session: Session, plan: Plan, experiment: Experiment, wanted: Wanted, title: str, log: Path) -> dict[str, Any]:
    hosts = {name: plan.hosts[name] for name, _ in experiment.placed}
    where = jobs.Environment.of(replace(plan, hosts=hosts))
    placed = [(hosts[name].network.address, count) for name, count in experiment.placed]
    job = jobs.own_job(where, placed, words_of(experiment, wanted), report="report.json")
    first = experiment.placed[0][0]
    result = jobs.run(session, first, job, where.interpreter, title, log, lambda _line: None)
    if result.interrupted:
        session.abort()
    if result.report is None or result.code:
        raise ProvisionError(jobs.no_report(result, job, log), where=", ".join(hosts), hint=f"read {log}")
    return result.report
