"""Hosts as containers. They are found by labels in the engine, never from notes that a crash may have prevented."""

from __future__ import annotations

import io
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import cast

import docker.errors
from docker import DockerClient
from docker.models.containers import Container
from docker.models.networks import Network
from docker.types import Mount

from provision.base import signals
from provision.base.errors import ProvisionError
from provision.sandbox import debootstrap, names
from provision.sandbox.containers import controller_settings
from provision.sandbox.containers.controller_settings import Settings
from provision.sandbox.host_files import FOLDER, PACKAGES, archive
from provision.sandbox.model import EngineName, Files, SandboxHost, Say

#: What was requested from the engine just before a crash can still appear; another pass finds it.
SETTLE_SECONDS = 1.0
MAX_PASSES = 30


class DockerEngine:
    """The engine's own exceptions are left to the caller (``container_engine.explained``)."""

    name: EngineName = "docker"

    def __init__(self, client: DockerClient) -> None:
        self._client = client

    def sandboxes(self) -> set[str]:
        """The names of all that have hosts."""
        return {str(container.labels[names.LABEL]) for container in self._labelled(names.LABEL)}

    def has(self, sandbox: str) -> bool:
        """Whether anything of it exists."""
        return bool(self._networks(sandbox) or self._containers(sandbox))

    def hosts(self, sandbox: str) -> list[SandboxHost]:
        """Running or not, in the order of their numbers."""
        return [_host(container) for container in self._containers(sandbox)]

    def create_network(self, sandbox: str, hosts: Sequence[str]) -> None:  # noqa: ARG002
        with signals.deferred():
            self._client.networks.create(names.network(sandbox), driver="bridge", labels={names.LABEL: sandbox})

    def image(self, sandbox: str, base: str, settings: Settings, say: Say) -> str:
        """Make the image (or the tree) of a base."""
        made = f"{names.REPOSITORY}/base", names.image_tag(sandbox, base)
        changes = [f"LABEL {names.LABEL}={sandbox}", f"LABEL {names.BASE}={base}"]
        return base_image(self._client, base, made, settings, say, PACKAGES, changes, prefer_made=True)

    def start(self, sandbox: str, host: str, image: str, labels: Mapping[str, str], settings: Settings, files: Files) -> SandboxHost:
        network = names.network(sandbox)
        with signals.deferred():
            container = self._client.containers.create(
                image,
                name=names.container(sandbox, host),
                hostname=host,
                entrypoint=["sh", f"/{FOLDER}/start.sh"],
                command=[],
                init=True,  # reaps what a killed SSH session leaves
                user="root",
                labels={names.LABEL: sandbox, names.ROLE: "host", names.HOST: host, **labels},
                network=network,
                networking_config={network: self._client.api.create_endpoint_config(aliases=[host])},
                mounts=[Mount(str(path), str(path), type="bind", read_only=True) for path in settings.mounts],
                use_config_proxy=False,  # proxies reach the hosts as files, which SSH sessions see
            )
        container.put_archive("/", archive(files(_release(container))))
        container.start()
        return _host(container)

    def process(self, host: SandboxHost) -> int:
        """The number of its first process on this machine; 0 where it does not run, or not here."""
        return int(self._container(host).attrs["State"]["Pid"])

    def public_keys(self, host: SandboxHost) -> str | None:
        """Its public ssh keys, not read over its network; None until its first start is complete."""
        try:
            code, output = self._container(host).exec_run(["sh", "-c", f"test -e /{FOLDER}/settled && cat /etc/ssh/ssh_host_*_key.pub"])
        except docker.errors.APIError:
            if not self.is_running(host):  # it stopped between the two requests
                return None
            raise
        return cast(bytes, output).decode() if code == 0 and output else None  # it may lose the output of a command that ends at once

    def is_running(self, host: SandboxHost) -> bool:
        return self._container(host).status == "running"

    def last_lines(self, host: SandboxHost) -> str:
        lines = self._container(host).logs(tail=5).decode(errors="replace").strip().splitlines()
        return " / ".join(lines) or "it printed nothing"

    def remove(self, sandbox: str, note: Say) -> None:
        """Remove everything but the sandbox's folder, until a pass finds none; ``note`` is called with what was removed."""
        for _ in range(MAX_PASSES):
            removed: list[str] = []
            for container in self._containers(sandbox):
                with _unless_gone():
                    container.remove(force=True, v=True)
                    removed.append(f"container {container.name}")
            for network in self._networks(sandbox):
                with _unless_gone():
                    network.remove()
                    removed.append(f"network {network.name}")
            for image in self._client.images.list(all=True, filters={"label": f"{names.LABEL}={sandbox}"}):
                if all(tag.startswith(f"{names.REPOSITORY}/") for tag in image.tags):  # else a user's image, built on one of these
                    with _unless_gone():
                        self._client.images.remove(str(image.id), force=True)
                        removed.append(f"image {image.tags[0] if image.tags else image.short_id}")
            for what in removed:
                note(what)
            if not removed:
                return
            time.sleep(SETTLE_SECONDS)
        what = f"The engine keeps {removed[-1]}, although it was removed."
        raise ProvisionError(what, where=f"sandbox {sandbox}", hint=f"Run `{names.command('down', sandbox)}` again.")

    def _networks(self, sandbox: str) -> list[Network]:
        return self._client.networks.list(filters={"label": f"{names.LABEL}={sandbox}"})

    def _containers(self, sandbox: str) -> list[Container]:
        return sorted(self._labelled(f"{names.LABEL}={sandbox}"), key=lambda container: names.number(container.labels[names.HOST]))

    def _labelled(self, label: str) -> list[Container]:
        return self._client.containers.list(all=True, filters={"label": [label, f"{names.ROLE}=host"]}, ignore_removed=True)

    def _container(self, host: SandboxHost) -> Container:
        return self._client.containers.get(host.container)


def base_image(
    client: DockerClient,
    base: str,
    made: tuple[str, str],
    settings: Settings,
    say: Say,
    packages: Sequence[str] = (),
    changes: Sequence[str] = (),
    *,
    prefer_made: bool = False,
    remark: Say | None = None,
) -> str:
    """The base's name in the engine: itself, or where Debian cannot be pulled, as in a sandbox, what debootstrap makes instead.

    Args:
        made: repository and tag of that; ``packages`` and ``changes``: what it has besides Debian's minimum.
        prefer_made: do not try to pull where the cache has what debootstrap made.
        remark: called instead of ``say`` where that replaces the base.

    Raises:
        ProvisionError: neither can be had.
    """
    with suppress(docker.errors.ImageNotFound):
        client.images.get(base)
        return base
    suite, name = debootstrap.suite_of(base), ":".join(made)
    if suite is None or not prefer_made or not debootstrap.tar(suite, packages).exists():
        say(f"pulling {base}")
        try:
            for entry in client.api.pull(base, stream=True, decode=True):
                if "error" in entry:
                    raise docker.errors.APIError(entry["error"])
            client.images.get(base)
            return base
        except docker.errors.APIError as failure:
            reason = str(failure.explanation or failure).strip().rstrip(".")
            missing = debootstrap.missing() if suite else "only debian:12 and debian:13 can be"
            if "no space left" in reason.lower():
                raise
            if suite is None or missing:
                what = f"the base image can be neither pulled ({reason}) nor made here ({missing})"
                hint = "see that its registry can be reached, load it by hand (`docker load`), or begin with another: --base IMAGE"
                raise ProvisionError(what, where=base, hint=hint) from failure
            (remark or say)(f"{base} cannot be pulled ({reason}); {name}, made by debootstrap, replaces it")
    with suppress(docker.errors.ImageNotFound):
        client.images.get(name)  # another import would be another image, for which no earlier build counts
        return name
    archive = debootstrap.make(suite, settings, say, packages)
    with signals.deferred():
        client.api.import_image(str(archive), *made, changes=list(changes))
    return name


@contextmanager
def _unless_gone() -> Iterator[None]:
    """Go on where the engine says that something no longer exists (404), or that it is in use or being removed (409)."""
    try:
        yield
    except docker.errors.APIError as failure:
        if failure.status_code not in (404, 409):
            raise


def _release(container: Container) -> dict[str, str]:
    """The container's os-release; empty when it has none."""
    for path in ("/etc/os-release", "/usr/lib/os-release"):  # the first is often a link, which the engine does not follow
        try:
            chunks, _ = container.get_archive(path)
        except docker.errors.NotFound:
            continue
        with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as tar:
            for member in tar:
                if file := tar.extractfile(member) if member.isfile() else None:
                    return controller_settings.parse_os_release(file.read().decode(errors="replace"))
    return {}


def _host(container: Container) -> SandboxHost:
    container.reload()
    networks = container.attrs["NetworkSettings"]["Networks"].values()
    address = next((one["IPAddress"] for one in networks if one["IPAddress"]), "")
    labels = {names.BASE: "", **container.labels}  # which a container that something else has made may lack
    return SandboxHost(labels[names.HOST], address, str(container.name), labels[names.BASE], labels.get(names.SUDO, ""), container.status)
