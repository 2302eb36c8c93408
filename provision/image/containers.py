"""Containers of an image as hosts that reach each other by SSH, with keys made for this run alone; all of it is gone afterwards."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker.errors
from docker import DockerClient
from docker.models.containers import Container
from docker.types import DeviceRequest

from provision import catalog
from provision.base import paths, signals
from provision.base.errors import ProvisionError
from provision.containers import ssh_keys
from provision.image import mesh

LABEL = "org.provision.verify"  # its value is the process that runs them
START_S = 60.0
_MEMORY = 1 << 30  # /dev/shm: Docker's 64 MiB are too few for PyTorch's loaders


@dataclass(frozen=True)
class Node:
    """One container as a host."""

    name: str
    address: str
    container: Container


@contextlib.contextmanager
def hosts(client: DockerClient, image: str, count: int, slots: int, prefix: str) -> Iterator[Path]:
    """The inventory file of ``count`` containers of ``image``, on a network of their own, each with sshd running.

    Raises:
        ProvisionError: a container does not come up.
    """
    sweep(client)
    run = f"{os.getpid()}-{secrets.token_hex(3)}"
    folder = _keys() / run
    labels = {LABEL: str(os.getpid())}
    try:
        folder.mkdir(parents=True, mode=0o700)
        with signals.deferred():
            network = client.networks.create(f"provision-verify-{run}", driver="bridge", labels=labels)
        names = [f"node{number}" for number in range(1, count + 1)]
        controller = ssh_keys.make_pair(folder / "id_ed25519", "provision image verify")
        theirs = {name: ssh_keys.make_pair(folder / f"{name}_mesh", f"provision {name}") for name in names}
        own = {name: ssh_keys.make_pair(folder / f"{name}_host", name) for name in names}
        nodes = []
        for name in names:
            files = {
                mesh.HOST_KEY: (folder / f"{name}_host").read_text(encoding="utf-8"),
                f"{mesh.HOST_KEY}.pub": own[name],
                mesh.AUTHORIZED: controller + "".join(f"restrict {key}" for key in theirs.values()),
                mesh.KEY: (folder / f"{name}_mesh").read_text(encoding="utf-8"),
            }
            nodes.append(_start(client, image, name, network.name or "", labels, files))
        port = catalog.images().ssh_port
        members = {node.name: mesh.member(node.address, port, own[node.name]) for node in nodes}
        for node in nodes:
            _lay(node.container, mesh.known(members))
        (folder / "known_hosts").write_text(mesh.text("known_hosts", members), encoding="utf-8")
        inventory = folder / "hosts.ini"
        inventory.write_text(_inventory(nodes, folder, slots, prefix), encoding="utf-8")
        for node in nodes:
            _wait(node, folder)
        yield inventory
    finally:
        with signals.ignored():
            _remove(client, str(os.getpid()))
            shutil.rmtree(folder, ignore_errors=True)


def sweep(client: DockerClient) -> None:
    """Remove what a run left that was killed: its containers, and its keys here."""
    for folder in _keys().glob("*-*"):
        if not Path(f"/proc/{folder.name.partition('-')[0]}").exists():
            shutil.rmtree(folder, ignore_errors=True)
    things = [
        *client.networks.list(filters={"label": LABEL}),
        *client.containers.list(all=True, ignore_removed=True, filters={"label": LABEL}),
    ]
    for owner in {_owner(thing) for thing in things}:
        if not Path(f"/proc/{owner}").exists():
            _remove(client, owner)


def _keys() -> Path:
    """Where runs keep their keys, each in a folder that its process names."""
    return paths.home() / "verify"


def _owner(thing: Any) -> str:
    return str((thing.attrs.get("Labels") or thing.attrs.get("Config", {}).get("Labels") or {}).get(LABEL, ""))


def _remove(client: DockerClient, owner: str) -> None:
    mine: dict[str, str | list[str] | bool] = {"label": f"{LABEL}={owner}"}
    for container in client.containers.list(all=True, filters=mine, ignore_removed=True):
        with contextlib.suppress(docker.errors.NotFound):
            container.remove(force=True, v=True)
    for network in client.networks.list(filters=mine):
        with contextlib.suppress(docker.errors.NotFound):
            network.remove()


def _start(client: DockerClient, image: str, name: str, network: str, labels: Mapping[str, str], files: Mapping[str, str]) -> Node:
    with signals.deferred():
        container = client.containers.create(
            image,
            hostname=name,
            init=True,
            labels=dict(labels),
            network=network,
            shm_size=_MEMORY,
            device_requests=_gpus(client),
            use_config_proxy=False,
        )
    _lay(container, files)
    container.start()
    container.reload()
    address = container.attrs["NetworkSettings"]["Networks"][network]["IPAddress"]
    return Node(name, address, container)


def _gpus(client: DockerClient) -> list[DeviceRequest]:
    """All of them, where the engine can give any to a container."""
    return [DeviceRequest(count=-1, capabilities=[["gpu"]])] if "nvidia" in (client.info().get("Runtimes") or {}) else []


def _lay(container: Container, files: Mapping[str, str]) -> None:
    """Files into the home of the image's user."""
    container.put_archive(mesh.home(), mesh.archive(files))


def _inventory(nodes: list[Node], folder: Path, slots: int, prefix: str) -> str:
    known = catalog.images()
    lines = [f"{node.name} ansible_host={node.address} slots={slots}" for node in nodes]
    trust = {"UserKnownHostsFile": folder / "known_hosts", "GlobalKnownHostsFile": "/dev/null", "StrictHostKeyChecking": "yes"}
    options = " ".join(f"-o {name}={value}" for name, value in {**trust, "IdentitiesOnly": "yes"}.items())
    return "\n".join(
        [
            *lines,
            "[all:vars]",
            f"ansible_user={known.user.name}",
            f"ansible_port={known.ssh_port}",
            f"ansible_ssh_private_key_file={folder / 'id_ed25519'}",
            f"ansible_ssh_common_args='{options}'",
            f"ansible_python_interpreter={prefix}/venv/bin/python",
            f"provision_prefix={prefix}",
            "provision_sudo=no",
            "",
        ]
    )


def _wait(node: Node, folder: Path) -> None:
    """Until sshd takes a login."""
    known = catalog.images()
    command = ["ssh", "-F", "/dev/null", "-i", str(folder / "id_ed25519"), "-p", str(known.ssh_port), "-o", "BatchMode=yes"]
    command += ["-o", "ConnectTimeout=5", "-o", "IdentitiesOnly=yes", "-o", f"UserKnownHostsFile={folder / 'known_hosts'}"]
    command += ["-o", "StrictHostKeyChecking=yes", f"{known.user.name}@{node.address}", "true"]
    deadline = time.monotonic() + START_S
    while True:
        tried = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if tried.returncode == 0:
            return
        node.container.reload()
        if node.container.status != "running" or time.monotonic() > deadline:
            said = node.container.logs(tail=5).decode(errors="replace").strip() or "it said nothing"
            raise ProvisionError(
                f"the container takes no login: {tried.stderr.strip() or node.container.status}; it said: {said}",
                where=node.name,
                hint="the image must run sshd, which is what it does where no other command is given",
            )
        time.sleep(0.2)
