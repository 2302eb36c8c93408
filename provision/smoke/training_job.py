"""The training job that ends every run, and whether its outcome counts.

Where the plan leaves PyTorch out, the engine's own check takes the training job's place: the same hosts, the same way in, no model.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from provision.base import paths, resources
from provision.base.errors import ProvisionError
from provision.inventory import Inventory
from provision.launch import jobs, mpirun
from provision.plan.model import Plan
from provision.plan.options import SmokeOptions
from provision.remote.session import Session
from provision.smoke import evaluation, mnist


@dataclass(frozen=True)
class SmokeResult:
    """The job's own report, one paragraph for people, and the reasons why it does not count (none: it does)."""

    report: Mapping[str, Any] | None
    summary: str | None
    faults: tuple[str, ...]


def run(
    session: Session,
    plan: Plan,
    options: SmokeOptions,
    *,
    bring: Callable[[Session, Plan, mnist.Dataset], None] | None = None,
    inside: str = "",
) -> SmokeResult:
    """Bring data and script to the hosts, train, and judge the result. Raises Interrupted after Ctrl-C, when the job has been ended.

    ``bring``, ``inside``: where the hosts' side is in containers, how things get there and the words that lead into the first host's.
    """
    hosts = list(plan.hosts.values())
    slots = [(host.network.address, host.slots) for host in hosts]
    np = options.np or sum(count for _, count in slots)
    placed = mpirun.spread(slots, np, oversubscribe=options.oversubscribe)
    data = None
    if all(host.torch for host in hosts):
        data = mnist.obtain(options.cache or paths.cache(), say=session.progress.line, source=options.source, data_dir=options.data)
        (bring or _push)(session, plan, data)
        folder = f"{hosts[0].prefix}/smoke"
        script = [f"{folder}/train_mnist.py", *data.flags(np, options.epochs), "--data-dir", f"{folder}/data/{data.digest}"]
        script += ["--checkpoint", "{job}/checkpoint.pt", "--report", "{job}/report.json", "--log-interval", "100"]
    else:
        script = ["-m", "collective_core.check", "--report", "{job}/report.json"]

    log = session.folder / "smoke.log"
    title = f"{'Train' if data else 'Check the engine'} on {len(hosts)} host(s), {np} rank(s)"
    # One thread per rank: the network is too small for more.
    job = jobs.mpi_job(jobs.Environment.of(plan), placed, ["python", *script], environment={jobs.THREADS: "1"}, report="report.json")
    result = jobs.run(
        session,
        hosts[0].name,
        job,
        f"{hosts[0].prefix}/venv/bin/python",
        title,
        log,
        lambda line: session.progress.line(f"    {mpirun.readable(line)}"),
        inside,
    )
    if result.interrupted:
        session.abort()
    if result.report is None:
        return SmokeResult(None, None, (jobs.no_report(result, job, log),))
    session.write("smoke.json", result.report)
    expected = {host.name: host.hostname for host in hosts}
    if data is None:
        return SmokeResult(
            result.report,
            f"{evaluation.check_summary(result.report)} (no PyTorch in this plan)",
            tuple(evaluation.judge_check(result.report, expected, np)),
        )
    ended_badly = [f"the job gave its report and then ended with exit code {result.code}"] if result.code else []
    faults = evaluation.judge(result.report, expected_hosts=expected, expected_np=np, bar=data.bar_for(np, options.epochs))
    return SmokeResult(result.report, evaluation.summary(result.report), tuple(faults or ended_badly))


def check_options(inventory: Inventory, options: SmokeOptions) -> None:
    """Raise UsageError for options that cannot work, before minutes are spent on an installation."""
    if options.np is not None:
        unknown = any(host.slots is None for host in inventory.hosts)  # then its GPUs say it, which only a look at it shows
        slots = [(host.address, host.slots or 1) for host in inventory.hosts]
        mpirun.spread(slots, options.np, oversubscribe=options.oversubscribe or unknown)
    if options.data is not None:
        mnist.obtain(paths.cache(), data_dir=options.data)


def _push(session: Session, plan: Plan, data: mnist.Dataset) -> None:
    outcome = session.play(
        resources.folder("playbooks") / "smoke.yml",
        "Copy the training job",
        hosts=list(plan.hosts),
        extra_vars={"provision_plan": plan.as_dict(), "provision_smoke_archive": str(_pack(session.folder / "training_job.tar", data))},
    )
    for name in outcome.failed:
        failure = outcome.hosts[name].failure
        raise ProvisionError(failure.text if failure else "failed", where=f"{name}, copying the training job")
    if outcome.rc != 0:
        raise ProvisionError("the training job could not be copied to the hosts", hint=f"read {outcome.log}")


def _pack(archive: Path, data: mnist.Dataset) -> Path:
    """Write script and data into one archive, relative to the hosts' prefix: a copy of each file would take Ansible seconds."""
    names = {resources.hostside("train_mnist.py"): "smoke/train_mnist.py"}
    names |= {file.path: f"smoke/data/{data.digest}/{file.name}" for file in data.files}
    with tarfile.open(archive, "w") as tar:
        for folder in ("smoke", "smoke/data", f"smoke/data/{data.digest}"):
            member = tarfile.TarInfo(folder)
            member.type, member.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(member)
        for path, name in names.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = path.stat().st_size, 0o644
            with path.open("rb") as file:
                tar.addfile(member, file)
    return archive
