"""Containers in which an image is verified: a sandbox on this machine whose hosts run the image, with keys for one run alone."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import docker.errors
from docker import DockerClient
from docker.models.containers import Container
from docker.types import DeviceRequest

from provision.base import paths, signals
from provision.base.errors import ProvisionError
from provision.catalog import Catalog, overlay
from provision.image import container_hosts
from provision.image.containers import MIN_MEMORY, WAIT_FOR_SSHD
from provision.image.local_images import ImageInfo
from provision.sandbox import names
from provision.sandbox.containers import ssh_keys
from provision.sandbox.docker_engine import DockerEngine

PREFIX = "verify-"  # of the sandbox's name; the process that runs it follows


@contextlib.contextmanager
def containers(client: DockerClient, image: ImageInfo, count: int) -> Iterator[Path]:
    """The inventory file of ``count`` containers of an image, on a network of their own, each with sshd running and one slot.

    Raises:
        ProvisionError: a container does not come up.
    """
    catalog, runs = overlay.own(), DockerEngine(client)
    for left in paths.sandbox().glob(f"{PREFIX}*"):  # not a user's own sandbox
        ours = re.fullmatch(rf"{PREFIX}(\d+)-[0-9a-f]{{6}}", left.name)
        if ours and not Path(f"/proc/{ours[1]}").exists():
            _remove(runs, left)
    folder = names.folder(f"{PREFIX}{os.getpid()}-{secrets.token_hex(3)}")
    hosts = [f"node{number}" for number in range(1, count + 1)]
    try:
        folder.mkdir(parents=True, mode=0o700)
        runs.create_network(folder.name, hosts)
        keys = container_hosts.make_keys(folder, [*hosts, "controller", "mesh"])
        started = {}
        for name in hosts:
            files = {
                container_hosts.HOST_KEY: keys[name].private,
                f"{container_hosts.HOST_KEY}.pub": keys[name].public,
                container_hosts.AUTHORIZED: f"{keys['controller'].public}restrict {keys['mesh'].public}",
                container_hosts.KEY: keys["mesh"].private,
            }
            started[name] = _start(client, image, folder.name, name, container_hosts.home_archive(files, catalog), catalog)
        addresses = {host.name: host.address for host in runs.hosts(folder.name)}
        port = catalog.images().ssh_port
        members = {name: container_hosts.member(addresses[name], port, keys[name].public, catalog) for name in hosts}
        for name, container in started.items():
            container.put_archive(container_hosts.home(catalog), container_hosts.home_archive(container_hosts.ssh_files(members), catalog))
            _wait_for_sshd(container, name)
        (folder / "known_hosts").write_text(container_hosts.ssh_file("known_hosts", members), encoding="utf-8")
        inventory = folder / "hosts.ini"
        inventory.write_text(_inventory(addresses, folder, keys["controller"].file, image.of("prefix"), catalog), encoding="utf-8")
        yield inventory
    finally:
        with signals.ignored():
            _remove(runs, folder)


def _remove(runs: DockerEngine, folder: Path) -> None:
    runs.remove(folder.name, lambda _line: None)
    shutil.rmtree(folder, ignore_errors=True)


def _start(client: DockerClient, image: ImageInfo, sandbox: str, name: str, files: bytes, catalog: Catalog) -> Container:
    gpus = "nvidia" in (client.info().get("Runtimes") or {})
    with signals.deferred():
        container = client.containers.create(
            image.id,
            name=names.container(sandbox, name),
            hostname=name,
            init=True,
            labels={names.LABEL: sandbox, names.ROLE: "host", names.HOST: name, names.BASE: image.name},
            network=names.network(sandbox),
            shm_size=MIN_MEMORY,
            device_requests=[DeviceRequest(count=-1, capabilities=[["gpu"]])] if gpus else [],
            use_config_proxy=False,
        )
    container.put_archive(container_hosts.home(catalog), files)
    container.start()
    return container


def _inventory(addresses: Mapping[str, str], folder: Path, key: Path, prefix: str, catalog: Catalog) -> str:
    known = catalog.images()
    lines = [
        *(f"{name} ansible_host={address} slots=1" for name, address in addresses.items()),
        "[all:vars]",
        f"ansible_user={known.user.name}",
        f"ansible_port={known.ssh_port}",
        f"ansible_ssh_private_key_file={key}",
        f"ansible_ssh_common_args='{' '.join(ssh_keys.options(folder / 'known_hosts'))}'",
        f"ansible_python_interpreter={prefix}/venv/bin/python",
        f"provision_prefix={prefix}",
        "provision_sudo=no",
    ]
    return "".join(f"{line}\n" for line in lines)


def _wait_for_sshd(container: Container, name: str) -> None:
    code = None
    with contextlib.suppress(docker.errors.APIError):  # the container has ended
        code = container.exec_run(["sh", "-c", WAIT_FOR_SSHD]).exit_code
    if code != 0:
        log = container.logs(tail=5).decode(errors="replace").strip() or "its log is empty"
        hint = "the image must run sshd, which is what it does where no other command is given"
        raise ProvisionError(f"sshd does not start in the container; its log: {log}", where=name, hint=hint)
