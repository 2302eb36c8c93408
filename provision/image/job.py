"""Runs a job in containers of an image, one on every host: brings the image, starts them, launches over SSH between them, takes all off."""

from __future__ import annotations

import io
import shlex
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from provision.base import resources, signals
from provision.base.errors import ProvisionError, UsageError
from provision.catalog import architectures
from provision.facts import Facts
from provision.image import job_containers, labels, remote_engines
from provision.image.labels import Told
from provision.image.remote_engines import Engine
from provision.inventory import Inventory
from provision.launch import jobs, mpirun, program, program_files
from provision.launch.program import RunOptions
from provision.plan.model import Plan
from provision.plan.options import SmokeOptions
from provision.remote import shell
from provision.remote.progress import Progress
from provision.remote.session import Session
from provision.smoke import mnist, training_job
from provision.survey import collect

_BRING_S = 600.0


@dataclass(frozen=True)
class Wanted:
    """What to run.

    Attributes:
        program: the user's; None trains MNIST as `provision smoke` does.
        smoke: how, where that is asked for.
        volumes: folders of the hosts in the containers.
        keep: leave the image on the hosts.
    """

    program: RunOptions | None
    smoke: SmokeOptions
    volumes: tuple[str, ...] = ()
    keep: bool = False


@dataclass(frozen=True)
class Ended:
    """How it ended: the job's exit code, and of the training job its summary and why it does not count."""

    code: int
    summary: str | None = None
    faults: tuple[str, ...] = ()


def run(inventory: Inventory, image: str, wanted: Wanted, shown: Progress, passwords: Mapping[str, str]) -> Ended:
    """Run a job in containers of ``image``; nothing of it is left on the hosts, however it ends.

    Args:
        image: a name, which this machine or a registry knows, or a file that `docker save` wrote.

    Raises:
        UsageError: it is no image of ours, or not for these hosts' processors.
        ProvisionError: a host cannot be used; it names it.
        Interrupted: after Ctrl-C, when everything has been ended.
    """
    source = remote_engines.source(image)
    if wanted.keep and not source.stays_as:
        raise UsageError("the image in this file has no name under which it could stay", where=image, hint="leave --keep out")
    session = Session(inventory, shown, passwords)
    try:
        with signals.also_when_ended():
            facts = _facts(session)
            engines = remote_engines.look(session)
            remote_engines.sweep(session, engines)
            _refuse_np([(name, job_containers.slots(inventory, name, facts, engines)) for name in engines], wanted)
            if source.attributes is not None:
                _refuse_unfit(source.attributes, labels.read(image, source.attributes), facts, engines)  # before it is brought anywhere
            with remote_engines.image_on(session, engines, source, keep=wanted.keep) as names:
                told = labels.read(image, source.attributes or {})
                _refuse_unfit(source.attributes or {}, told, facts, engines)
                if not told.ready:
                    shown.line(f"{image} is not proven: provision image verify")
                with job_containers.up(session, engines, facts, told, names, wanted.volumes) as plan:
                    return _job(session, plan, engines, wanted)
    finally:
        session.close()


def _facts(session: Session) -> dict[str, Facts]:
    survey = collect.survey_hosts(session)
    absent = [host.name for host in session.inventory.hosts if host.name not in survey.hosts]
    for problem in survey.problems:
        if problem.host in absent:  # the others' problems are about installing, which is not asked for
            raise ProvisionError(problem.what, where=problem.host, hint=problem.hint)
    if absent:
        raise ProvisionError("nothing is known of it", where=", ".join(absent), hint="leave it out: --limit")
    return survey.hosts


def _refuse_np(slots: Sequence[tuple[str, int]], wanted: Wanted) -> None:
    """Raise UsageError for more ranks than there are slots, or too few for all hosts to train, before anything is brought."""
    if wanted.program is None:
        mpirun.spread(slots, wanted.smoke.np or sum(count for _, count in slots), oversubscribe=wanted.smoke.oversubscribe)
    elif not wanted.program.elastic:
        mpirun.fill(slots, wanted.program.np, oversubscribe=wanted.program.oversubscribe)


def _refuse_unfit(attributes: Mapping[str, Any], told: Told, facts: Mapping[str, Facts], engines: Mapping[str, Engine]) -> None:
    """Raise for hosts on which the image cannot do what it is for."""
    arch = architectures.kernel_name(str(attributes.get("Architecture", "")))
    others = [name for name, each in facts.items() if arch and each.arch != arch]
    if others:
        raise UsageError(f"the image is for {arch}, and they are not", where=", ".join(others), hint="leave them out: --limit")
    blind = [name for name, each in facts.items() if each.gpus and not engines[name].nvidia]
    if told.of("nccl") and blind:
        what = "its container engine cannot give its GPUs to a container, which the image is for"
        raise ProvisionError(what, where=", ".join(blind), hint="install there: nvidia-container-toolkit, then restart docker")


def _job(session: Session, plan: Plan, engines: Mapping[str, Engine], wanted: Wanted) -> Ended:
    first = next(iter(plan.hosts))
    inside = job_containers.inside(session, engines[first])
    if wanted.program is None:

        def bring(session: Session, plan: Plan, data: mnist.Dataset) -> None:
            _bring_training(session, plan, data, engines)

        result = training_job.run(session, plan, wanted.smoke, bring=bring, inside=inside)
        return Ended(1 if result.faults else 0, result.summary, result.faults)
    options = wanted.program
    hosts = list(plan.hosts.values())
    slots = [(host.network.address, host.slots) for host in hosts]
    placed = mpirun.fill(slots, None if options.elastic else options.np, oversubscribe=options.oversubscribe)
    there = {host.name: host for host in hosts[: len(placed)]}
    where = jobs.Environment.of(replace(plan, hosts=there))
    where = replace(where, networks=options.networks) if options.networks else where
    workdir, command = options.workdir, list(options.command)
    if workdir is None:
        packed = program_files.pack(options.command, options.bring, modules=options.modules)
        command, workdir = packed.command, f"{{home}}/{packed.place}"
        scripts = {name: f"{job_containers.inside(session, engines[name])} sh -c {shlex.quote(packed.unpack)}" for name in there}
        program_files.ship(session, packed, scripts)
    job = program.job_of(where, placed, command, workdir, options)
    return Ended(program.follow(session, first, job, where.interpreter, placed, options, inside=inside))


def _bring_training(session: Session, plan: Plan, data: mnist.Dataset, engines: Mapping[str, Engine]) -> None:
    """The training script and its data, into every container where `training_job.run` looks for them."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for file in data.files:
            tar.add(file.path, f"data/{data.digest}/{file.path.name}")
        tar.add(resources.hostside("train_mnist.py"), "train_mnist.py")
    session.progress.stage("Bring the training job to the containers", list(plan.hosts))
    scripts = {
        name: f"{job_containers.inside(session, engines[name])} tar -x -f - --no-same-owner -C {shlex.quote(host.prefix)}/smoke"
        for name, host in plan.hosts.items()
    }
    for name, answer in shell.ask(session, scripts, stdin=buffer.getvalue(), timeout=_BRING_S).items():
        if answer.code != 0:
            raise ProvisionError(answer.complaint, where=f"{name}, bringing the training job")
