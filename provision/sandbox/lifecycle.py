"""``up``, ``status`` and ``down``: how a sandbox is made and removed.

A sandbox is found by its labels in the engine, never from notes that a crash may have prevented.
"""

from __future__ import annotations

import io
import os
import secrets
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import docker.errors
from docker import DockerClient
from docker.models.containers import Container
from docker.types import Mount

from provision.base import process_locks, signals, terminal
from provision.base.errors import ProvisionError, UsageError
from provision.containers import container_engine, controller_settings, ssh_keys
from provision.containers.controller_settings import Settings
from provision.sandbox import debootstrap, names
from provision.sandbox.host_files import FOLDER, PACKAGES, Login, archive, host_files
from provision.sandbox.model import Sandbox, SandboxHost, SudoMode

Say = Callable[[str], None]

#: A base that lacks packages installs them first, from a mirror that may be slow; a host that fails is noticed at once.
START_SECONDS = 600
#: A `down` may meet an `up` that is cleaning up after Ctrl-C.
LOCK_SECONDS = 30
#: What was requested from the engine just before a crash can still appear; another pass finds it.
SETTLE_SECONDS = 1.0
MAX_PASSES = 30


def up(
    *,
    count: int = 2,
    base: str | Sequence[str] | None = None,
    name: str = "default",
    say: Say = terminal.say,
    sudo: SudoMode = "nopasswd",
    slots: int = 2,
) -> Sandbox:
    """Make a sandbox and return when every host accepts its key over SSH. What was begun is removed again if that fails.

    Args:
        count: number of hosts.
        base: image of the hosts, or several, handed out in turn; ``debian:12`` when None.
        name: of the sandbox.
        say: called with one line for each step.
        sudo: how the ordinary user becomes root: without password, with one (written to ``become_password``), or not at all.
        slots: ranks per host, as the inventory states it.

    Raises:
        UsageError: an invalid value.
        ProvisionError: no engine, an unavailable base, a host that does not start, or another sandbox of that name.
    """
    names.check(name)
    base_of = names.base_images(count, base)
    if slots < 1:
        raise UsageError(f"slots={slots}: slots are at least 1")
    with _locked(name), _engine(f"making sandbox {name}") as client:
        label = {"label": f"{names.LABEL}={name}"}
        if names.folder(name).exists() or client.networks.list(filters=label) or _containers(client, name):
            return _existing(client, name, base_of, sudo, slots, say)
        try:
            return _make(client, name, base_of, sudo, slots, say)
        except BaseException:
            with signals.ignored():
                say("removing what was made so far")
                try:
                    with container_engine.explained(f"removing sandbox {name}"):
                        _remove(client, name, lambda _line: None)
                except ProvisionError as failure:  # it must not hide why the removal was needed
                    say(f"not all could be removed ({failure.what}): run `{names.command('down', name)}` later")
            raise


def status(name: str = "default") -> Sandbox | None:
    """The sandbox as it is now, each host with its state; None when there is none of that name.

    Raises:
        ProvisionError: no engine answers, or the sandbox's keys and inventory are missing.
    """
    names.check(name)
    with _engine(f"looking for sandbox {name}") as client:
        containers = _containers(client, name)
        sandbox = _sandbox(name, containers)
    if containers and not sandbox.inventory.exists():
        if names.folder(name).exists():
            raise ProvisionError(
                f"Sandbox '{name}' is incomplete: it is still being made, or its making was interrupted.",
                hint=f"If no process makes it, remove it: `{names.command('down', name)}`.",
            )
        raise ProvisionError(
            f"Sandbox '{name}' is up, but its keys and inventory are not in {sandbox.inventory.parent}.",
            hint="Set PROVISION_HOME as it was when the sandbox was made. "
            f"If nobody needs it any more, remove it: `{names.command('down', name)}`.",
        )
    return sandbox if containers else None


def every() -> list[Sandbox]:
    """All sandboxes of this machine, by name. Raises ProvisionError where no engine answers."""
    with _engine("looking for sandboxes") as client:
        labelled = client.containers.list(all=True, filters={"label": [names.LABEL, f"{names.ROLE}=host"]}, ignore_removed=True)
        found = sorted({str(container.labels[names.LABEL]) for container in labelled})
        return [_sandbox(name, _containers(client, name)) for name in found]


def down(name: str = "default", say: Say = terminal.say) -> list[str]:
    """Remove every trace of a sandbox, also of one whose making was killed. Doing it twice does no harm.

    Returns:
        What was removed, one phrase each; empty when there was nothing.

    Raises:
        ProvisionError: no engine answers, so that containers may still exist; or another process works on the sandbox.
    """
    names.check(name)
    with _locked(name), _engine(f"removing sandbox {name}") as client:
        return _remove(client, name, say)


# --------------------------------------------------------------------------------------------------------------- making


def _make(client: DockerClient, name: str, base_of: list[str], sudo: SudoMode, slots: int, say: Say) -> Sandbox:
    settings = controller_settings.read(os.environ, prefix=Path(sys.prefix))
    for warning in settings.warnings:
        say(f"warning: {warning}")
    folder = names.folder(name)
    folder.mkdir(parents=True, mode=0o700)
    public_key = ssh_keys.make_pair(folder / "id_ed25519", comment=f"provision sandbox {name}")
    login = Login(public_key, sudo, secrets.token_urlsafe(12) if sudo == "password" else None)
    if login.password:
        file = folder / "become_password"
        file.touch(mode=0o600)
        file.write_text(login.password + "\n", encoding="utf-8")
    with signals.deferred():
        client.networks.create(names.network(name), driver="bridge", labels={names.LABEL: name})

    image_of = {base: _image(client, name, base, settings, say) for base in dict.fromkeys(base_of)}
    hosts = [f"node{number}" for number in range(1, len(base_of) + 1)]
    say(f"starting {len(hosts)} host(s)")
    containers = []
    for host, base in zip(hosts, base_of, strict=True):
        with container_engine.explained(f"starting {host}"):
            container = _create(client, name, host, image_of[base], {names.BASE: base, names.SUDO: sudo}, settings)
            container.put_archive("/", archive(host_files(settings, _release(container), login, hosts)))
            container.start()
        containers.append(container)

    say(f"waiting for sshd on {len(hosts)} host(s)")
    deadline = time.monotonic() + START_SECONDS
    keys_of = {container.labels[names.HOST]: _host_keys(container, deadline) for container in containers}
    sandbox = _sandbox(name, containers)
    known_hosts = ssh_keys.known_hosts({(host.name, host.address): keys_of[host.name] for host in sandbox.hosts})
    sandbox.known_hosts.write_text(known_hosts, encoding="utf-8")
    sandbox.inventory.write_text(sandbox.inventory_text(slots), encoding="utf-8")
    for made, container in zip(sandbox.hosts, containers, strict=True):
        _wait_for_login(sandbox, made, container, deadline)
    return sandbox


def _existing(client: DockerClient, name: str, base_of: list[str], sudo: SudoMode, slots: int, say: Say) -> Sandbox:
    """The sandbox that exists already, if it is the requested one and healthy."""
    containers = _containers(client, name)
    sandbox = _sandbox(name, containers)
    same = [host.base for host in sandbox.hosts] == base_of and all(one.labels.get(names.SUDO) == sudo for one in containers)
    if same and sandbox.running and sandbox.inventory.exists() and sandbox.key.exists():
        deadline = time.monotonic() + START_SECONDS
        for host, container in zip(sandbox.hosts, containers, strict=True):
            _wait_for_login(sandbox, host, container, deadline)
        sandbox.inventory.write_text(sandbox.inventory_text(slots), encoding="utf-8")
        say(f"sandbox {name} is up already")
        return sandbox
    found = ", ".join(f"{host.name} ({host.base}, {host.state})" for host in sandbox.hosts) or "what an interrupted run left"
    hint = f"Take another name (--name), or if nobody needs it any more, remove it first: `{names.command('down', name)}`."
    raise ProvisionError(f"There is another sandbox '{name}': {found}.", hint=hint)


def _image(client: DockerClient, name: str, base: str, settings: Settings, say: Say) -> str:
    """The image that hosts of that base run: the base itself, or where it cannot be pulled, what debootstrap makes."""
    try:
        client.images.get(base)
    except docker.errors.ImageNotFound:
        pass
    else:
        return base
    suite = debootstrap.suite_of(base)
    if suite is None or not debootstrap.tar(suite, PACKAGES).exists():
        say(f"pulling {base}")
        try:
            client.images.pull(base)
        except docker.errors.DockerException as failure:
            reason = str(getattr(failure, "explanation", None) or failure).strip().rstrip(".")
            missing = debootstrap.missing() if suite else "only debian:12 and debian:13 can be"
            if suite is None or missing:
                raise ProvisionError(
                    f"The base can be neither pulled ({reason}) nor made here ({missing}).",
                    where=f"base {base}",
                    hint="Check that the registry can be reached, or load the image by hand (`docker load`). For debian:12 and debian:13, "
                    "as root: `apt-get install debootstrap`, then the same command again.",
                ) from failure
            say(f"{base} cannot be pulled ({reason})")
        else:
            return base
    archive_file = debootstrap.make(suite, settings, say, PACKAGES)
    repository, tag = f"{names.REPOSITORY}/base", names.image_tag(name, base)
    with signals.deferred():
        client.api.import_image(str(archive_file), repository, tag, changes=[f"LABEL {names.LABEL}={name}", f"LABEL {names.BASE}={base}"])
    return f"{repository}:{tag}"


def _create(client: DockerClient, name: str, host: str, image: str, labels: dict[str, str], settings: Settings) -> Container:
    network = names.network(name)
    with signals.deferred():
        return client.containers.create(
            image,
            name=names.container(name, host),
            hostname=host,
            entrypoint=["sh", f"/{FOLDER}/start.sh"],
            command=[],
            init=True,  # reaps what a killed SSH session leaves
            user="root",
            labels={names.LABEL: name, names.ROLE: "host", names.HOST: host, **labels},
            network=network,
            networking_config={network: client.api.create_endpoint_config(aliases=[host])},
            mounts=[Mount(str(path), str(path), type="bind", read_only=True) for path in settings.mounts],
            use_config_proxy=False,  # proxies reach the hosts as files, which SSH sessions see
        )


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


def _host_keys(container: Container, deadline: float) -> str:
    """The host's public keys, read through the engine: nobody on the network can forge them."""
    host = container.labels[names.HOST]
    with container_engine.explained(f"starting {host}"):
        while True:
            _fail_if_stopped(container)
            try:
                code, output = container.exec_run(["sh", "-c", f"test -e /{FOLDER}/settled && cat /etc/ssh/ssh_host_*_key.pub"])
            except docker.errors.APIError:
                _fail_if_stopped(container)  # it stopped between the two requests
                raise
            if code == 0 and output:  # the engine may lose the output of a command that ends at once
                return cast(bytes, output).decode()
            if time.monotonic() > deadline:
                what = f"The host was not ready within {START_SECONDS} s: {_last_lines(container)}"
                raise ProvisionError(what, where=host, hint="Check that apt's mirror answers, or try again on a less loaded machine.")
            time.sleep(0.2)


def _wait_for_login(sandbox: Sandbox, host: SandboxHost, container: Container, deadline: float) -> None:
    """Log in as a reader of the inventory would, with the key and the known host, until it works."""
    command = ["ssh", "-F", "/dev/null", *sandbox.ssh_options(), "-o", "BatchMode=yes", "-o", "ConnectTimeout=5"]
    command += ["-i", str(sandbox.key), f"{sandbox.user}@{host.address}", "true"]
    while True:
        try:
            tried = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        except FileNotFoundError as failure:
            what = "This machine has no ssh."
            raise ProvisionError(what, hint="Install the SSH client: `sudo apt-get install openssh-client`.") from failure
        if tried.returncode == 0:
            return
        with container_engine.explained(f"starting {host.name}"):
            _fail_if_stopped(container)
        if time.monotonic() > deadline:
            raise ProvisionError(
                f"The host runs, but accepts no login at {host.address}: {tried.stderr.strip()}",
                where=host.name,
                hint="The engine must run on this machine itself (see DOCKER_HOST), without a firewall in front of its networks.",
            )
        time.sleep(0.2)


def _fail_if_stopped(container: Container) -> None:
    container.reload()
    if container.status != "running":
        hint = "A base must be Debian or a relative of it; the packages of a minimal one come from apt's mirror: check that it answers."
        what = f"The host stopped right after its start: {_last_lines(container)}"
        raise ProvisionError(what, where=container.labels[names.HOST], hint=hint)


def _last_lines(container: Container) -> str:
    lines = container.logs(tail=5).decode(errors="replace").strip().splitlines()
    return " / ".join(lines) or "it printed nothing"


# ------------------------------------------------------------------------------------------------------------- removing


def _remove(client: DockerClient, name: str, say: Say) -> list[str]:
    """Remove containers, networks, images and files of one sandbox, until a pass finds none."""
    removed: list[str] = []

    def note(what: str) -> None:
        say(f"removed {what}")
        removed.append(what)

    for _ in range(MAX_PASSES):
        before = len(removed)
        for container in _containers(client, name):
            with _unless_gone():
                container.remove(force=True, v=True)
                note(f"container {container.name}")
        for network in client.networks.list(filters={"label": f"{names.LABEL}={name}"}):
            with _unless_gone():
                network.remove()
                note(f"network {network.name}")
        for image in client.images.list(all=True, filters={"label": f"{names.LABEL}={name}"}):
            if all(tag.startswith(f"{names.REPOSITORY}/") for tag in image.tags):  # else a user's image, built on one of these
                with _unless_gone():
                    client.images.remove(str(image.id), force=True)
                    note(f"image {image.tags[0] if image.tags else image.short_id}")
        if len(removed) == before:
            break
        time.sleep(SETTLE_SECONDS)
    else:
        what = f"The engine keeps {removed[-1]}, although it was removed."
        raise ProvisionError(what, where=f"sandbox {name}", hint=f"Run `{names.command('down', name)}` again.")
    if names.folder(name).exists():
        shutil.rmtree(names.folder(name))
        note(f"folder {names.folder(name)}")
    for what in debootstrap.remove_partial():
        note(what)
    return removed


@contextmanager
def _unless_gone() -> Iterator[None]:
    """Go on where the engine says that something no longer exists (404), or that it is in use or being removed (409)."""
    try:
        yield
    except docker.errors.APIError as failure:
        if failure.status_code not in (404, 409):
            raise


# -------------------------------------------------------------------------------------------------------------- finding


def _containers(client: DockerClient, name: str) -> list[Container]:
    """The sandbox's containers, running or not, in the order of their numbers."""
    found = client.containers.list(all=True, filters={"label": [f"{names.LABEL}={name}", f"{names.ROLE}=host"]}, ignore_removed=True)
    return sorted(found, key=lambda container: int(container.labels[names.HOST].removeprefix("node")))


def _sandbox(name: str, containers: Sequence[Container]) -> Sandbox:
    folder = names.folder(name)
    password = folder / "become_password"
    return Sandbox(
        name=name,
        hosts=[_host(container) for container in containers],
        inventory=folder / "hosts.ini",
        user=names.USER,
        key=folder / "id_ed25519",
        known_hosts=folder / "known_hosts",
        become_password=password if password.exists() else None,
    )


def _host(container: Container) -> SandboxHost:
    container.reload()
    networks = container.attrs["NetworkSettings"]["Networks"].values()
    address = next((one["IPAddress"] for one in networks if one["IPAddress"]), "")
    labels = container.labels
    return SandboxHost(labels[names.HOST], address, str(container.name), labels[names.BASE], container.status)


@contextmanager
def _engine(step: str) -> Iterator[DockerClient]:
    """A client of the engine, whose failures within the block become errors about that step."""
    client = container_engine.connect()
    try:
        with container_engine.explained(step):
            yield client
    finally:
        client.close()


@contextmanager
def _locked(name: str) -> Iterator[None]:
    with process_locks.acquired(names.lock(f"sandbox-{name}"), LOCK_SECONDS) as lock:
        if not lock:
            raise ProvisionError(f"Another process is making or removing sandbox '{name}'.", hint="Wait for it, or end it, then try again.")
        yield
