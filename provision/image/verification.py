"""Verifies an image by running it: doctor's checks in its containers, the engine's self-check, and the smoke job across them.

The containers are on this machine, with keys and a network for this run alone. An image that passes gets the label by which it is ready.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import docker.errors
from docker import DockerClient
from docker.models.containers import Container
from docker.types import DeviceRequest

from provision import catalog
from provision.base import paths, signals
from provision.base.documents import Document
from provision.base.errors import Interrupted, ProvisionError, UsageError
from provision.diagnosis.findings import Finding
from provision.doctor import reachability
from provision.doctor.checks import examine
from provision.image import container_hosts, local_images
from provision.image.local_images import ImageInfo
from provision.inventory import loading
from provision.launch import jobs, launchers, placement, rank_output
from provision.launch.smoke import evaluation, training_job
from provision.plan.model import Plan
from provision.plan.options import SmokeOptions
from provision.remote import progress
from provision.remote.session import Session
from provision.sandbox.containers import container_engine
from provision.survey import Facts, collect

LABEL = "org.provision.verify"  # of containers and networks; its value is the process that runs them
_SLOTS = 1  # ranks in each container
_START_S = 60.0
_MEMORY = 1 << 30  # /dev/shm: Docker's 64 MiB are too few for PyTorch's loaders


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

    def as_dict(self) -> Document:
        """Plain data for JSON."""
        return {
            "schema": 1,
            "image": self.image,
            "ready": self.ready,
            "faults": self.faults,
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
                containers(client, info, count) as inventory,
                Session(loading.load(str(inventory)), shown, command="provision image verify") as session,
            ):
                verdict.folder = session.folder
                _check(session, options, verdict)
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


def _check(session: Session, options: SmokeOptions, verdict: Verdict) -> None:
    survey = collect.survey_hosts(session)
    absent = [host.name for host in session.inventory.hosts if host.name not in survey.hosts]
    if absent:
        verdict.faults += [str(problem) for problem in survey.problems if problem.host in absent]
        return
    # The survey's preflight problems do not count: they are about installing, which is done.
    known = {name: facts_of_container(facts) for name, facts in survey.hosts.items()}
    connections, problems = reachability.check(session, known)
    verdict.findings = examine(known, problems, connections)
    verdict.faults += [
        f"{finding.host or 'between hosts'}: {finding.what}: {finding.observed}"
        for finding in verdict.findings
        if finding.severity == "error"
    ]
    plan = container_hosts.plan_of(session.inventory, known, alone=False)
    _check_engine(session, plan, verdict)
    if not verdict.faults:
        result = training_job.run(session, plan, options)
        verdict.faults += [fault.what for fault in result.faults]
        verdict.summaries += [result.summary] if result.summary else []


def facts_of_container(facts: Facts) -> Facts:
    """The facts without what a container sees of its host and cannot use: devices that were not given to it say nothing of the image."""
    without: dict[str, Any] = {"infiniband": []}
    if not facts.gpus:
        without |= {"driver": None, "nvidia": facts.nvidia.model_copy(update={"pci_devices": [], "nouveau": False})}
    return facts.model_copy(update=without)


def _check_engine(session: Session, plan: Plan, verdict: Verdict) -> None:
    """Every collective against its expected result, across the containers."""
    hosts = list(plan.hosts.values())
    placed = placement.spread([(host.network.address, 2) for host in hosts], 2 * len(hosts))
    options = launchers.RunOptions(("python", "-m", "collective_core.check", "--report", "{job}/report.json"), report="report.json")
    job = launchers.mpi_job(launchers.Environment.of(plan), placed, options)
    log = session.folder / "check.log"
    title = f"Check the engine in {len(hosts)} containers, {2 * len(hosts)} ranks"

    def show(line: str) -> None:
        session.progress.line(f"    {rank_output.readable(line)}", "dim")

    result = jobs.run(session, job, title, log, show)
    if result.interrupted:
        session.abort()
    if result.report is None:
        verdict.faults.append(f"the engine's self-check gave no report (exit code {result.code}); read {log}")
        return
    summary, faults = evaluation.evaluate_check(result.report, {host.name: host.hostname for host in hosts}, 2 * len(hosts))
    if not faults and result.code:
        faults = [evaluation.fault("exit-code", f"the engine's self-check ended with exit code {result.code}")]
    verdict.faults += [fault.what for fault in faults]
    verdict.summaries += [summary] if summary else []


def _refuse_nameless(client: DockerClient, image: str) -> None:
    """A label makes another image, to which the name must move. Raises UsageError for an id or a digest."""
    names = client.images.get(image).tags
    if ":".join(local_images.split_name(image)) not in names:
        hint = f"provision image verify {names[0]}" if names else f"docker tag {image} mine:1, then provision image verify mine:1"
        raise UsageError("an image is verified by its name, which carries the label afterwards", where=image, hint=hint)


def label(client: DockerClient, image: ImageInfo, layers: str, how: str) -> None:
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


@contextlib.contextmanager
def containers(client: DockerClient, image: ImageInfo, count: int) -> Iterator[Path]:
    """The inventory file of ``count`` containers of an image, on a network of their own, each with sshd running.

    Raises:
        ProvisionError: a container does not come up.
    """
    _remove_killed(client)
    run = f"{os.getpid()}-{secrets.token_hex(3)}"
    folder = _keys_folder() / run
    labels = {LABEL: str(os.getpid())}
    try:
        folder.mkdir(parents=True, mode=0o700)
        with signals.deferred():
            network = client.networks.create(f"provision-verify-{run}", driver="bridge", labels=labels)
        names = [f"node{number}" for number in range(1, count + 1)]
        keys = container_hosts.make_keys(folder, [*names, "controller", "mesh"])
        started, members = {}, {}
        for name in names:
            files = {
                container_hosts.HOST_KEY: keys[name].private,
                f"{container_hosts.HOST_KEY}.pub": keys[name].public,
                container_hosts.AUTHORIZED: f"{keys['controller'].public}restrict {keys['mesh'].public}",
                container_hosts.KEY: keys["mesh"].private,
            }
            started[name] = _start(client, image.id, name, network.name or "", labels, files)
            address = started[name].attrs["NetworkSettings"]["Networks"][network.name]["IPAddress"]
            members[name] = container_hosts.member(address, catalog.images().ssh_port, keys[name].public)
        for container in started.values():
            container.put_archive(container_hosts.home(), container_hosts.home_archive(container_hosts.ssh_files(members)))
        (folder / "known_hosts").write_text(container_hosts.ssh_file("known_hosts", members), encoding="utf-8")
        addresses = {name: str(member["address"]) for name, member in members.items()}
        trust = _trust(folder)
        inventory = folder / "hosts.ini"
        inventory.write_text(_inventory(addresses, trust, keys["controller"].file, image.of("prefix")), encoding="utf-8")
        for name, container in started.items():
            _wait(container, name, addresses[name], [*trust, "-i", str(keys["controller"].file)])
        yield inventory
    finally:
        with signals.ignored():
            _remove(client, str(os.getpid()))
            shutil.rmtree(folder, ignore_errors=True)


def _remove_killed(client: DockerClient) -> None:
    """Remove what killed processes left: their containers and networks, and their keys."""
    for folder in _keys_folder().glob("*-*"):
        if not Path(f"/proc/{folder.name.partition('-')[0]}").exists():
            shutil.rmtree(folder, ignore_errors=True)
    things = [
        *client.networks.list(filters={"label": LABEL}),
        *client.containers.list(all=True, ignore_removed=True, filters={"label": LABEL}),
    ]
    labels = [thing.attrs.get("Labels") or thing.attrs.get("Config", {}).get("Labels") or {} for thing in things]
    for owner in {str(each.get(LABEL, "")) for each in labels}:
        if not Path(f"/proc/{owner}").exists():
            _remove(client, owner)


def _keys_folder() -> Path:
    """Where runs keep their keys, each in a folder that its process names."""
    return paths.home() / "verify"


def _remove(client: DockerClient, owner: str) -> None:
    own: dict[str, str | list[str] | bool] = {"label": f"{LABEL}={owner}"}
    for container in client.containers.list(all=True, filters=own, ignore_removed=True):
        with contextlib.suppress(docker.errors.NotFound):
            container.remove(force=True, v=True)
    for network in client.networks.list(filters=own):
        with contextlib.suppress(docker.errors.NotFound):
            network.remove()


def _start(client: DockerClient, image: str, name: str, network: str, labels: Mapping[str, str], files: Mapping[str, str]) -> Container:
    gpus = "nvidia" in (client.info().get("Runtimes") or {})
    with signals.deferred():
        container = client.containers.create(
            image,
            hostname=name,
            init=True,
            labels=dict(labels),
            network=network,
            shm_size=_MEMORY,
            device_requests=[DeviceRequest(count=-1, capabilities=[["gpu"]])] if gpus else [],
            use_config_proxy=False,
        )
    container.put_archive(container_hosts.home(), container_hosts.home_archive(files))
    container.start()
    container.reload()
    return container


def _trust(folder: Path) -> list[str]:
    """ssh's options that trust the containers' keys and no others."""
    options = {
        "UserKnownHostsFile": folder / "known_hosts",
        "GlobalKnownHostsFile": "/dev/null",
        "StrictHostKeyChecking": "yes",
        "IdentitiesOnly": "yes",
    }
    return [word for name, value in options.items() for word in ("-o", f"{name}={value}")]


def _inventory(addresses: Mapping[str, str], trust: Sequence[str], key: Path, prefix: str) -> str:
    known = catalog.images()
    lines = [
        *(f"{name} ansible_host={address} slots={_SLOTS}" for name, address in addresses.items()),
        "[all:vars]",
        f"ansible_user={known.user.name}",
        f"ansible_port={known.ssh_port}",
        f"ansible_ssh_private_key_file={key}",
        f"ansible_ssh_common_args='{' '.join(trust)}'",
        f"ansible_python_interpreter={prefix}/venv/bin/python",
        f"provision_prefix={prefix}",
        "provision_sudo=no",
    ]
    return "".join(f"{line}\n" for line in lines)


def _wait(container: Container, name: str, address: str, options: Sequence[str]) -> None:
    """Wait until sshd takes a login."""
    known = catalog.images()
    command = ["ssh", "-F", "/dev/null", *options, "-p", str(known.ssh_port), "-o", "BatchMode=yes", "-o", "ConnectTimeout=5"]
    command += [f"{known.user.name}@{address}", "true"]
    deadline = time.monotonic() + _START_S
    while True:
        tried = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if tried.returncode == 0:
            return
        container.reload()
        if container.status != "running" or time.monotonic() > deadline:
            log = container.logs(tail=5).decode(errors="replace").strip() or "its log is empty"
            raise ProvisionError(
                f"the container takes no login: {tried.stderr.strip() or container.status}; its log: {log}",
                where=name,
                hint="the image must run sshd, which is what it does where no other command is given",
            )
        time.sleep(0.2)
