"""Verifies an image by running it: doctor's checks in its containers, the engine's self-check, and the smoke job across them.

The containers are on this machine, with keys and a network for this run alone. An image that passes gets the label by which it is ready.
"""

from __future__ import annotations

import io
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import docker.errors
from docker import DockerClient

from provision.base import resources, signals
from provision.base.errors import Interrupted, ProvisionError, UsageError
from provision.base.problems import Problem
from provision.diagnosis.findings import Finding
from provision.doctor.checks import examine
from provision.image import container_hosts, local_images, trial_containers
from provision.inventory import loading
from provision.launch.smoke import training_job
from provision.plan.model import Plan
from provision.plan.options import SmokeOptions
from provision.remote import progress, ssh
from provision.remote.session import Session
from provision.sandbox.containers import container_engine
from provision.survey import Facts, collect, gpu_code, reachability

_LOAD_S = 300.0  # for gigabytes of libraries


@dataclass
class Verdict:
    """What running an image showed.

    Attributes:
        faults: why it is not ready; empty when it is.
        findings: what doctor found in its containers.
        folder: logs and the reports of the jobs.
    """

    image: str
    faults: list[Problem] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    summaries: list[str] = field(default_factory=list)
    folder: Path = Path()
    seconds: float = 0.0

    @property
    def ready(self) -> bool:
        """Whether it counts as ready now."""
        return not self.faults

    def add(self, result: training_job.SmokeResult) -> None:
        """Add what a job across the containers showed."""
        self.faults += result.faults
        self.summaries += [result.summary] if result.summary else []

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        return {
            "schema": 1,
            "image": self.image,
            "ready": self.ready,
            "faults": [fault.as_dict() for fault in self.faults],
            "findings": [{"id": f.id, "severity": f.severity, "host": f.host, "title": f.what, "seen": f.observed} for f in self.findings],
            "summaries": self.summaries,
            "folder": str(self.folder),
            "seconds": round(self.seconds, 1),
        }


def verify(image: str, count: int, options: SmokeOptions, shown: progress.Progress) -> Verdict:
    """Run ``count`` containers of an image and judge them; the image gets its label when nothing is wrong.

    Raises:
        UsageError: not an image of ours.
        ProvisionError: no engine, or containers that do not come up.
    """
    began = time.monotonic()
    try:
        with local_images.engine() as client, signals.termination_as_interrupt(), container_engine.explained(f"verifying {image}"):
            info = local_images.get(client, image)
            _refuse_nameless(client, image)
            verdict = Verdict(image)
            with (
                trial_containers.containers(client, info, count) as inventory,
                Session(loading.load(str(inventory)), shown, command="provision image verify") as session,
            ):
                verdict.folder = session.folder
                _check(session, options, info, verdict)
                verdict.seconds = time.monotonic() - began
                session.write("verify.json", verdict.as_dict())
                session.record.exit_code = 0 if verdict.ready else 1
            if verdict.ready:
                layers = local_images.layers_digest(local_images.attributes(client, info.id))
                label(client, info, layers, f"{count} containers; {'; '.join(verdict.summaries)}")
            elif info.ready:  # it was verified once and does not hold
                label(client, info, "", f"not ready: {verdict.faults[0]}")
    except (KeyboardInterrupt, Interrupted):
        raise Interrupted("interrupted; the containers are gone, and the image is not verified", where=image) from None
    return verdict


def _check(session: Session, options: SmokeOptions, info: local_images.ImageInfo, verdict: Verdict) -> None:
    survey = collect.survey_hosts(session)
    if absent := [problem for problem in survey.problems if problem.host not in survey.hosts]:
        verdict.faults += absent
        return
    # The survey's preflight problems do not count: they are about installing, which is done.
    known = {name: facts_of_container(facts) for name, facts in survey.hosts.items()}
    connections, problems = reachability.check(session, known)
    verdict.findings = examine(known, problems, connections, catalog=session.catalog)
    for finding in verdict.findings:
        if finding.severity == "error":
            what, where = f"{finding.what}: {finding.observed}", None if finding.host else "between hosts"
            verdict.faults.append(Problem("error", what, id=finding.id, host=finding.host, where=where))
    plan = container_hosts.plan_of(session.inventory, known, alone=False)
    _check_cuda(session, plan, known, info, verdict)
    verdict.add(training_job.check_engine(session, plan))
    if not verdict.faults:
        on_gpus = all(known[name].gpus and host.torch and host.torch.for_gpus for name, host in plan.hosts.items())
        verdict.add(training_job.run(session, plan, options, on_gpus=on_gpus))


def _check_cuda(session: Session, plan: Plan, known: Mapping[str, Facts], info: local_images.ImageInfo, verdict: Verdict) -> None:
    """Load the CUDA libraries in one container and compare their code with the GPUs that the image is for, which needs none."""
    name, host = next(iter(plan.hosts.items()))
    if host.torch is None or host.torch.cuda is None:
        return
    gpus, python = info.of("gpus").split(), f"{host.prefix}/venv/bin/python"
    found = gpu_code.check(session, {name: python}, gpus, package="torch") if gpus else []
    problems = [each for each in found if each.severity == "error"]
    verdict.summaries += [each.what for each in found if each.severity != "error"]
    load = resources.folder("playbooks") / "roles/pytorch/files/load_pytorch.py"  # as on hosts
    command = f"{shlex.quote(python)} -B - {shlex.quote(f'cuda={host.torch.cuda}')}{'' if known[name].gpus else ' no-driver'}"
    answer = ssh.run(session, {name: command}, stdin=load.read_bytes(), timeout=_LOAD_S)[name]
    if answer.code != 0:
        problems.append(Problem("error", answer.error, id="library-broken", host=name))
    verdict.faults += problems
    if not problems:
        code = f" and has code for compute capability {', '.join(gpus)}" if gpus else ""
        unverified = "" if known[name].gpus else "; GPU not verified: the containers have none"
        verdict.summaries.append(f"CUDA {host.torch.cuda}: every library loads{code}{unverified}")


def facts_of_container(facts: Facts) -> Facts:
    """The facts without what a container sees of its host and cannot use: devices that were not given to it say nothing of the image."""
    without: dict[str, Any] = {"infiniband": []}
    if not facts.gpus:
        without |= {"driver": None, "nvidia": facts.nvidia.model_copy(update={"pci_devices": [], "nouveau": False})}
    return facts.model_copy(update=without)


def _refuse_nameless(client: DockerClient, image: str) -> None:
    """A label makes another image, to which the name must move. Raises UsageError for an id or a digest."""
    names = client.images.get(image).tags
    if ":".join(local_images.split_name(image)) not in names:
        hint = f"provision image verify {names[0]}" if names else f"docker tag {image} mine:1, then provision image verify mine:1"
        raise UsageError("an image is verified by its name, which carries the label afterwards", where=image, hint=hint)


def label(client: DockerClient, image: local_images.ImageInfo, layers: str, how: str) -> None:
    """Give the image its label: nothing in it changes but what it says of itself. Its name moves in one step, if it is still this image's.

    Args:
        layers: what was verified; empty withdraws an earlier verification.
    """
    labels = {
        local_images.VERIFIED: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        local_images.VERIFIED_LAYERS: layers,
        local_images.VERIFIED_BY: " ".join(how.split()),
    }
    dockerfile = io.BytesIO(f"FROM {image.id}\n".encode())
    try:
        made = str(client.images.build(fileobj=dockerfile, labels=labels, rm=True, forcerm=True, use_config_proxy=False)[0].id)
    except docker.errors.BuildError as error:
        raise ProvisionError(f"the image could not be labelled: {error.msg}", where=image.name) from error
    with signals.deferred():
        now = client.images.get(image.name).id
        if now != image.id:
            client.images.remove(made)
            what = f"while it was verified the name went to another image ({str(now)[7:19]}); the one that ran was {image.id[7:19]}"
            raise ProvisionError(what, where=image.name, hint=f"verify that one, too: provision image verify {image.name}")
        client.images.get(made).tag(*local_images.split_name(image.name))
