"""Containers in which an image is verified: on this machine, with keys and a network for one run alone."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import docker.errors
from docker import DockerClient
from docker.models.containers import Container
from docker.types import DeviceRequest

from provision.base import paths, signals
from provision.base.errors import ProvisionError
from provision.catalog import Catalog, overlay
from provision.catalog.models import Images
from provision.image import container_hosts
from provision.image.local_images import ImageInfo

LABEL = "org.provision.verify"  # of containers and networks; its value is the process that runs them
_SLOTS = 1  # ranks in each container
_START_S = 60.0
_MEMORY = 1 << 30  # /dev/shm: Docker's 64 MiB are too few for PyTorch's loaders


@contextlib.contextmanager
def containers(client: DockerClient, image: ImageInfo, count: int) -> Iterator[Path]:
    """The inventory file of ``count`` containers of an image, on a network of their own, each with sshd running.

    Raises:
        ProvisionError: a container does not come up.
    """
    _remove_killed(client)
    catalog = overlay.own()
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
            started[name] = _start(client, image.id, name, network.name or "", labels, files, catalog)
            address = started[name].attrs["NetworkSettings"]["Networks"][network.name]["IPAddress"]
            members[name] = container_hosts.member(address, catalog.images().ssh_port, keys[name].public, catalog)
        for container in started.values():
            container.put_archive(container_hosts.home(catalog), container_hosts.home_archive(container_hosts.ssh_files(members), catalog))
        (folder / "known_hosts").write_text(container_hosts.ssh_file("known_hosts", members), encoding="utf-8")
        addresses = {name: str(member["address"]) for name, member in members.items()}
        trust = _trust(folder)
        inventory = folder / "hosts.ini"
        inventory.write_text(_inventory(addresses, trust, keys["controller"].file, image.of("prefix"), catalog.images()), encoding="utf-8")
        for name, container in started.items():
            _wait(container, name, addresses[name], [*trust, "-i", str(keys["controller"].file)], catalog.images())
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


def _start(
    client: DockerClient, image: str, name: str, network: str, labels: Mapping[str, str], files: Mapping[str, str], catalog: Catalog
) -> Container:
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
    container.put_archive(container_hosts.home(catalog), container_hosts.home_archive(files, catalog))
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


def _inventory(addresses: Mapping[str, str], trust: Sequence[str], key: Path, prefix: str, known: Images) -> str:
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


def _wait(container: Container, name: str, address: str, options: Sequence[str], known: Images) -> None:
    """Wait until sshd takes a login."""
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
