"""The training job that ends every run; where the plan has no PyTorch, the engine's own check on the same hosts takes its place."""

from __future__ import annotations

import shlex
import shutil
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from pydantic import ValidationError

from provision.base import paths, resources
from provision.base.documents import Document
from provision.base.errors import ProvisionError
from provision.base.problems import Problem
from provision.base.text import counted, joined
from provision.catalog import Catalog
from provision.inventory import Inventory
from provision.launch import jobs, launchers, placement, rank_output
from provision.launch.launchers import Environment, RunOptions
from provision.launch.smoke import evaluation, mnist
from provision.plan.model import Plan
from provision.plan.options import SmokeOptions
from provision.remote import ssh
from provision.remote.ansible import TASK_S
from provision.remote.session import Session
from provision.remote.stage_view import TrainingProgress

_CHECK = ("-m", "collective_core.check", "--report", "{job}/report.json")


@dataclass(frozen=True)
class SmokeResult:
    """The job's own report, a summary for people, and the reasons why the job did not succeed."""

    report: Document | None
    summary: str | None
    faults: tuple[Problem, ...]


def run(session: Session, plan: Plan, options: SmokeOptions, *, on_gpus: bool = False) -> SmokeResult:
    """Copy data and script to the hosts, train, and evaluate the result: with ``on_gpus`` each rank must have had one.

    Raises Interrupted after Ctrl-C, when the job has been ended.
    """
    hosts = list(plan.hosts.values())
    slots = [(host.network.address, host.slots) for host in hosts]
    np = options.np or sum(count for _, count in slots)
    placed = placement.spread(slots, np, oversubscribe=options.oversubscribe)
    data = None
    if all(host.torch for host in hosts):
        cache, say = options.cache or paths.cache(), session.progress.detail
        data = mnist.obtain(cache, session.catalog, say=say, source=options.source, data_dir=options.data)
        _copy(session, plan, data)
        folder = f"{hosts[0].prefix}/smoke"
        script = [f"{folder}/train_mnist.py", *data.flags(np, options.epochs), "--data-dir", f"{folder}/data/{data.digest}"]
        script += ["--report", "{job}/report.json", "--log-interval", "20", "--json-lines"]
    else:
        script = [*_CHECK]
    # One thread per rank: the network is too small for more.
    program = RunOptions(("python", *script), environment={launchers.THREADS: "1"}, report="report.json")
    job = launchers.mpi_job(Environment.of(plan), placed, program)
    of_all = f"{counted(len(hosts), 'host')}, {counted(np, 'rank')}"
    title = f"{'Train' if data else 'Check the engine'} on {of_all}"
    log = session.folder / "smoke.log"
    names = {host.network.address: host.name for host in hosts}
    session.record.ranks = {names[address]: count for address, count in placed}

    def show(line: str) -> None:
        for tag, text in rank_output.pieces(line):
            if now := _progress(tag, text):
                session.progress.training(now)
            elif text and not rank_output.is_noise(text):
                session.progress.line(f"    {rank_output.readable(tag + text)}")

    expected = {host.name: host.hostname for host in hosts}
    with session.timeline.timed(session.step, "job", list(plan.hosts)) as timed:
        result = jobs.run(session, job, title, log, show, noted=_for_people)
        session.progress.close()
        if result.interrupted:
            session.abort()
        if result.report is None:
            return SmokeResult(None, None, (evaluation.fault("report-missing", jobs.no_report(result, job, log)),))
        session.write("smoke.json", result.report)
        if data is None:
            summary, faults = evaluation.evaluate_check(result.report, expected, np)
            summary = f"{summary or 'engine check'} (no PyTorch in this plan)"
        else:
            bar, on_gpus = data.bar_for(np, options.epochs), on_gpus and not options.oversubscribe
            summary, faults = evaluation.evaluate_training(result.report, expected, np, bar, on_gpus=on_gpus)
        if not faults and result.code:
            faults = [evaluation.fault("exit-code", f"the job wrote its report and then ended with exit code {result.code}")]
        if not faults:
            timed.state = "ok"
    return SmokeResult(result.report, summary, tuple(faults))


def check_engine(session: Session, plan: Plan) -> SmokeResult:
    """Check every collective against its expected result, with two ranks on each host, which are containers."""
    hosts = list(plan.hosts.values())
    placed = placement.spread([(host.network.address, 2) for host in hosts], 2 * len(hosts))
    job = launchers.mpi_job(Environment.of(plan), placed, RunOptions(("python", *_CHECK), report="report.json"))
    log = session.folder / "check.log"
    title = f"Check the engine in {len(hosts)} containers, {2 * len(hosts)} ranks"
    result = jobs.run(session, job, title, log, lambda line: session.progress.line(f"    {rank_output.readable(line)}", "dim"))
    if result.interrupted:
        session.abort()
    if result.report is None:
        what = f"the engine's self-check gave no report (exit code {result.code}); read {log}"
        return SmokeResult(None, None, (evaluation.fault("report-missing", what),))
    summary, faults = evaluation.evaluate_check(result.report, {host.name: host.hostname for host in hosts}, 2 * len(hosts))
    if not faults and result.code:
        faults = [evaluation.fault("exit-code", f"the engine's self-check ended with exit code {result.code}")]
    return SmokeResult(result.report, summary, tuple(faults))


def _progress(tag: str, text: str) -> TrainingProgress | None:
    """What rank 0 says of how far the job is; None of any other output."""
    try:
        return TrainingProgress.model_validate_json(text) if not rank_output.readable(tag) else None
    except ValidationError:
        return None


def _for_people(line: str) -> str:
    """A line of the job's with how far it is in words."""
    said = ((tag, text, _progress(tag, text)) for tag, text in rank_output.pieces(line))
    return "".join(tag + (f"{100 * now.part:3.0f} %  {now}" if now else text) for tag, text, now in said)


def check_options(inventory: Inventory, options: SmokeOptions, catalog: Catalog) -> None:
    """Raise UsageError for options that cannot work, before minutes are spent on an installation."""
    if options.np is not None:
        unknown = any(host.slots is None for host in inventory.hosts)  # the survey counts their GPUs
        slots = [(host.address, host.slots or 1) for host in inventory.hosts]
        placement.spread(slots, options.np, oversubscribe=options.oversubscribe or unknown)
    if options.data is not None:
        mnist.obtain(paths.cache(), catalog, data_dir=options.data)


def _copy(session: Session, plan: Plan, data: mnist.Dataset) -> None:
    files = {resources.hostside("train_mnist.py"): "train_mnist.py"}
    files |= {file.path: f"data/{data.digest}/{file.name}" for file in data.files}
    copy_files(session, plan, files, "the training job")


def copy_files(session: Session, plan: Plan, files: Mapping[Path, str], what: str) -> None:
    """Copy files to the hosts: file → its path below ``smoke`` in a host's prefix. Raises ProvisionError for a host where that fails."""
    archive = _pack(session.folder / "smoke.tar", files)

    def feed(pipe: IO[bytes]) -> None:
        with archive.open("rb") as file:
            shutil.copyfileobj(file, pipe)

    scripts: dict[str, str] = {}
    stdin: dict[str, ssh.Feed] = {}
    for name, host in plan.hosts.items():
        unpack = f"umask 022 && tar -x -f - --no-same-owner -C {shlex.quote(host.prefix)}"
        scripts[name], stdin[name] = ssh.as_root(session, name, unpack, feed) if host.root else (unpack, feed)
    session.progress.stage(f"Copy {what}", list(plan.hosts))
    answers = ssh.run(session, scripts, stdin=stdin, timeout=TASK_S, task="Copy and unpack the job's files")
    failed = {name: answer.error for name, answer in answers.items() if answer.code != 0}
    if failed:
        raise ProvisionError("; ".join(dict.fromkeys(failed.values())), where=f"{joined(list(failed))}, copying {what}")


def _pack(archive: Path, files: Mapping[Path, str]) -> Path:
    """Write the files into one archive, relative to the hosts' prefix: a copy of each would take Ansible seconds."""
    names = {path: f"smoke/{name}" for path, name in files.items()}
    folders = {str(parent) for name in names.values() for parent in PurePosixPath(name).parents} - {"."}
    with tarfile.open(archive, "w") as tar:
        for folder in sorted(folders):
            member = tarfile.TarInfo(folder)
            member.type, member.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(member)
        for path, name in names.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = path.stat().st_size, 0o644
            with path.open("rb") as file:
                tar.addfile(member, file)
    return archive
