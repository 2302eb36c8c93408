"""Proves an image by running it: doctor's checks in its containers, the engine's self-check, and the training job across them.

Only then does the image get the label by which it counts as ready.
"""

from __future__ import annotations

import io
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import docker.errors
from docker import DockerClient

from provision.base import signals
from provision.base.errors import ProvisionError, UsageError
from provision.containers import container_engine
from provision.diagnosis.findings import Finding
from provision.doctor import reach
from provision.doctor.checks import examine
from provision.facts import Facts
from provision.image import containers, job_containers, labels, store
from provision.inventory import loading
from provision.launch import jobs, mpirun
from provision.plan.model import Plan
from provision.plan.options import SmokeOptions
from provision.remote import progress
from provision.remote.session import Session
from provision.smoke import evaluation, training_job
from provision.survey import collect

SLOTS = 1  # ranks a container


@dataclass
class Verdict:
    """What running an image showed.

    Attributes:
        faults: why it is not ready, a sentence each; empty when it is.
        findings: what doctor found in its containers.
        folder: logs and the reports of the jobs.
    """

    image: str
    faults: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    summaries: list[str] = field(default_factory=list)
    folder: Path = Path()
    seconds: float = 0.0

    @property
    def ready(self) -> bool:
        """Whether it counts as ready now."""
        return not self.faults

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "schema": 1,
            "image": self.image,
            "ready": self.ready,
            "faults": self.faults,
            "findings": [{"id": f.id, "severity": f.severity, "host": f.host, "title": f.title, "seen": f.seen} for f in self.findings],
            "summaries": self.summaries,
            "folder": str(self.folder),
            "seconds": round(self.seconds, 1),
        }


def verify(image: str, count: int, options: SmokeOptions, shown: progress.Progress) -> Verdict:
    """Run ``count`` containers of an image and judge them; the image gets its label when nothing is wrong.

    Raises:
        UsageError: no image of ours, or too few containers.
        ProvisionError: no engine, or containers that do not come up.
    """
    if count < 2:
        raise UsageError(f"--hosts {count}: an image is proven by containers that train together", hint="--hosts 2")
    began = time.monotonic()
    client = container_engine.connect()
    try:
        with signals.also_when_ended(), container_engine.explained(f"verifying {image}"):
            told = store.get(client, image)
            _refuse_nameless(client, image)
            verdict = Verdict(image)
            with containers.hosts(client, told.image, count, SLOTS, told.of("prefix")) as inventory:
                session = Session(loading.load(str(inventory)), shown)
                try:
                    verdict.folder = session.folder
                    _run(session, options, verdict)
                    verdict.seconds = time.monotonic() - began
                    session.write("verify.json", verdict.as_dict())
                finally:
                    session.close()
            if verdict.ready:
                layers = labels.layers(client.images.get(told.image).attrs)
                _label(client, image, told, layers, f"{count} containers; {'; '.join(verdict.summaries)}")
            elif told.ready:  # it was proven once and does not hold
                _label(client, image, told, "", f"not ready: {verdict.faults[0]}")
    except KeyboardInterrupt:
        raise ProvisionError("interrupted; the containers are gone, and the image is not proven", where=image) from None
    finally:
        client.close()
    return verdict


def _run(session: Session, options: SmokeOptions, verdict: Verdict) -> None:
    survey = collect.survey_hosts(session)
    absent = [host.name for host in session.inventory.hosts if host.name not in survey.hosts]
    if absent:
        verdict.faults += [str(problem) for problem in survey.problems if problem.host in absent]
        return
    # Of the survey's own problems none counts: they are about installing, which is done.
    known = {name: of_container(facts) for name, facts in survey.hosts.items()}
    answers, unable = reach.look(session, known)
    verdict.findings = examine(known, unable, answers)
    verdict.faults += [
        f"{finding.host or 'between them'}: {finding.title}: {finding.seen}" for finding in verdict.findings if finding.severity == "error"
    ]
    plan = job_containers.plan_of(session.inventory, known, alone=False)
    _check_engine(session, plan, verdict)
    if not verdict.faults:
        result = training_job.run(session, plan, options)
        verdict.faults += result.faults
        verdict.summaries += [result.summary] if result.summary else []


def of_container(facts: Facts) -> Facts:
    """The facts without what a container sees of its host and cannot use: devices that were not given to it say nothing of the image."""
    without: dict[str, Any] = {"infiniband": []}
    if not facts.gpus:
        without |= {"driver": None, "nvidia": facts.nvidia.model_copy(update={"pci_devices": [], "nouveau": False})}
    return facts.model_copy(update=without)


def _check_engine(session: Session, plan: Plan, verdict: Verdict) -> None:
    """Every collective against what it must give, across the containers."""
    hosts = list(plan.hosts.values())
    placed = mpirun.spread([(host.network.address, 2) for host in hosts], 2 * len(hosts))
    where = jobs.Environment.of(plan)
    job = jobs.mpi_job(where, placed, ["python", "-m", "collective_core.check", "--report", "{job}/report.json"], report="report.json")
    log = session.folder / "check.log"
    title = f"Check the engine in {len(hosts)} containers, {2 * len(hosts)} ranks"

    def show(line: str) -> None:
        session.progress.line(f"    {mpirun.readable(line)}", "dim")

    result = jobs.run(session, hosts[0].name, job, where.interpreter, title, log, show)
    if result.interrupted:
        session.abort()
    if result.report is None:
        verdict.faults.append(f"the engine's self-check gave no report (exit code {result.code}); read {log}")
        return
    faults = evaluation.judge_check(result.report, {host.name: host.hostname for host in hosts}, 2 * len(hosts))
    verdict.faults += faults or ([f"the engine's self-check ended with exit code {result.code}"] if result.code else [])
    verdict.summaries.append(evaluation.check_summary(result.report))


def _refuse_nameless(client: DockerClient, image: str) -> None:
    """The proof is a label, and labels make another image: it needs a name that can move there. Raises UsageError for an id or a digest."""
    repository, tag = labels.parted(image)
    names = client.images.get(image).tags
    if f"{repository}:{tag}" not in names:
        hint = f"provision image verify {names[0]}" if names else f"docker tag {image} mine:1, then provision image verify mine:1"
        raise UsageError("an image is verified by its name, which carries the proof afterwards", where=image, hint=hint)


def _label(client: DockerClient, image: str, told: labels.Told, layers: str, how: str) -> None:
    """Give the image its label: nothing in it changes but what it says of itself. Its name moves in one step, if it is still this image's.

    Args:
        layers: what was proven; empty takes an earlier proof away.
    """
    said = {
        labels.VERIFIED: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        labels.VERIFIED_LAYERS: layers,
        labels.VERIFIED_BY: " ".join(how.split()),
    }
    dockerfile = io.BytesIO(f"FROM {told.image}\n".encode())
    try:
        made = str(client.images.build(fileobj=dockerfile, labels=said, rm=True, forcerm=True, use_config_proxy=False)[0].id)
    except docker.errors.BuildError as error:
        raise ProvisionError(f"the image could not be labelled: {error.msg}", where=image) from error
    repository, tag = labels.parted(image)
    with signals.held_back():
        now = client.images.get(image).id
        if now != told.image:
            client.images.remove(made)
            what = f"while it was verified the name went to another image ({str(now)[7:19]}); the one that ran was {told.image[7:19]}"
            raise ProvisionError(what, where=image, hint=f"verify that one, too: provision image verify {image}")
        client.images.get(made).tag(repository, tag)
