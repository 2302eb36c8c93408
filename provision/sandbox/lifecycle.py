"""``up``, ``status`` and ``down``: the order in which a sandbox comes to be and goes. Each step's how is in a file of its own."""

from __future__ import annotations

import os
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast, get_args

import docker.errors
from docker import DockerClient
from docker.models.containers import Container
from docker.types import Mount

from provision.base import process_locks, signals, terminal
from provision.base.errors import ProvisionError, UsageError
from provision.containers import container_engine, controller_settings, ssh_keys
from provision.sandbox import bases, hostfiles, images, inventory, names, sweep
from provision.sandbox.model import Sandbox, SandboxHost, SudoMode

Say = Callable[[str], None]

#: Making the host keys and the trust store takes seconds on a fast machine; a loaded one gets a minute and a half.
START_SECONDS = 90
#: A `down` may meet an `up` that is cleaning after Ctrl-C.
LOCK_SECONDS = 30


def up(
    *,
    count: int = 2,
    base: str | Sequence[str] | None = None,
    name: str = "default",
    say: Say = terminal.say,
    sudo: SudoMode = "nopasswd",
    slots: int = 2,
) -> Sandbox:
    """Makes a sandbox and returns when every host takes its key over SSH. What was begun is removed again if that fails.

    Args:
        count: number of hosts.
        base: image of the hosts, or several, handed out in turn; ``debian:12`` when None.
        name: of the sandbox.
        say: told in single lines what is being done.
        sudo: how the ordinary user becomes root: without password, with one (written to ``become_password``), or not at all.
        slots: processes per host, as the inventory states it.

    Raises:
        UsageError: a value that makes no sense.
        ProvisionError: no engine, a base that cannot be had, a host that does not start, or another sandbox of that name.
    """
    names.checked(name)
    wanted = bases.assign(count, base)
    if slots < 1 or sudo not in get_args(SudoMode):
        raise UsageError(f"slots={slots}, sudo={sudo}: slots are at least 1, sudo is one of {', '.join(get_args(SudoMode))}.")
    with _only_one(name), _engine() as client:
        if _exists(client, name):
            return _as_it_is(client, name, wanted, sudo, slots, say)
        try:
            return _make(client, name, wanted, sudo, slots, say)
        except BaseException:
            with signals.ignored():
                _undo(client, name, say)
            raise


def status(name: str = "default") -> Sandbox | None:
    """The sandbox as it is now, each host with its state; None when there is none of that name.

    Raises:
        ProvisionError: no engine answers, or its keys and inventory lie in another state folder.
    """
    names.checked(name)
    with _engine() as client, container_engine.explained(f"looking at sandbox {name}"):
        found = [_host(container) for container in sweep.hosts(client, name)]
        folder = sweep.folder(client, name)
    if found and folder is not None and folder.resolve() != names.folder(name).resolve():
        raise ProvisionError(
            f"Sandbox '{name}' is up, but its keys and its inventory are in another state folder: {folder}",
            hint=f"Use that one: PROVISION_HOME={shlex.quote(str(folder.parent.parent))}; or another name: --name",
        )
    return _sandbox(name, found) if found else None


def down(name: str = "default", say: Say = terminal.say) -> list[str]:
    """Removes every trace of a sandbox, also of one whose making was killed. Doing it twice does no harm.

    Returns:
        What was removed, one phrase each; empty when there was nothing.

    Raises:
        ProvisionError: no engine answers, so that containers may still be there; or another process works on the sandbox.
    """
    names.checked(name)
    with _only_one(name), _engine() as client, container_engine.explained(f"removing sandbox {name}"):
        return sweep.sweep(client, name, say)


def _undo(client: DockerClient, name: str, say: Say) -> None:
    """Removes what a failed ``up`` made; that the cleaning fails too must not hide why it was needed."""
    say("removing what was made so far")
    try:
        with container_engine.explained(f"removing sandbox {name}"):
            sweep.sweep(client, name, lambda _line: None)
    except ProvisionError as failure:
        say(f"not all could be removed ({failure.what}): run `provision sandbox down` later")


def _make(client: DockerClient, name: str, wanted: list[str], sudo: SudoMode, slots: int, say: Say) -> Sandbox:
    settings = controller_settings.read(os.environ, prefix=Path(sys.prefix))
    for warning in settings.warnings:
        say(f"warning: {warning}")

    folder = names.folder(name)
    password = secrets.token_urlsafe(12) if sudo == "password" else None
    with container_engine.explained(f"writing {folder}"):
        folder.mkdir(parents=True, mode=0o700)
        public_key = ssh_keys.make_pair(folder / "id_ed25519", comment=f"provision sandbox {name}")
        if password:
            _write_private(folder / "become_password", password + "\n")

    distinct = list(dict.fromkeys(wanted))
    with container_engine.explained("making the hosts' network"), signals.held_back():
        pulls = ",".join(base for base in distinct if images.absent(client, base))
        client.networks.create(
            names.network(name), driver="bridge", labels={names.LABEL: name, names.PULLS: pulls, names.FOLDER: str(folder)}
        )

    image_of = {base: images.host_image(client, name, base, settings, say) for base in distinct}

    containers = []
    hosts = [f"node{number}" for number in range(1, len(wanted) + 1)]
    for host, base in zip(hosts, wanted, strict=True):
        with container_engine.explained(f"starting {host}"):
            container = _create(client, name, host, base, image_of[base], sudo, settings)
            files = hostfiles.start_files(settings, images.release_of(container), public_key, sudo, password, hosts)
            container.put_archive("/", hostfiles.archive(hostfiles.FOLDER, files))
            container.start()
            containers.append(container)

    say(f"waiting for sshd on {len(hosts)} host(s)")
    deadline = time.monotonic() + START_SECONDS
    public = {container.labels[names.HOST]: _host_keys(container, deadline) for container in containers}
    sandbox = _sandbox(name, [_host(container) for container in containers])
    sandbox.known_hosts.write_text(
        ssh_keys.known_hosts({(host.name, host.address): public[host.name] for host in sandbox.hosts}), encoding="utf-8"
    )
    sandbox.inventory.write_text(inventory.render(sandbox, slots), encoding="utf-8")
    for made, container in zip(sandbox.hosts, containers, strict=True):
        _wait_for_login(sandbox, made, container, deadline)
    return sandbox


def _create(
    client: DockerClient, name: str, host: str, base: str, image: str, sudo: SudoMode, settings: controller_settings.Settings
) -> Container:
    network = names.network(name)
    with signals.held_back():
        return client.containers.create(
            image,
            name=names.container(name, host),
            hostname=host,
            entrypoint=["sh", f"/{hostfiles.FOLDER}/start.sh"],
            command=[],
            init=True,  # reaps what a killed SSH session leaves
            user="root",
            labels={names.LABEL: name, names.ROLE: "host", names.HOST: host, names.BASE: base, names.SUDO: sudo},
            network=network,
            networking_config={network: client.api.create_endpoint_config(aliases=[host])},
            mounts=[Mount(str(path), str(path), type="bind", read_only=True) for path in settings.mounts],
            use_config_proxy=False,  # proxies reach the hosts as files, which SSH sessions see
        )


def _host_keys(container: Container, deadline: float) -> str:
    """The host's public keys, asked for through the engine: whoever sits on the network cannot forge them."""
    host = container.labels[names.HOST]
    with container_engine.explained(f"starting {host}"):
        while True:
            _fail_if_stopped(container)
            try:
                code, output = container.exec_run(["sh", "-c", f"test -e /{hostfiles.FOLDER}/settled && cat /etc/ssh/ssh_host_*_key.pub"])
            except docker.errors.APIError:
                _fail_if_stopped(container)  # it stopped between the look and the question
                raise
            if code == 0:
                return cast(bytes, output).decode()
            if time.monotonic() > deadline:
                raise ProvisionError(
                    f"The host was not ready within {START_SECONDS} s: {_last_lines(container)}",
                    where=host,
                    hint="Try again on a less loaded machine.",
                )
            time.sleep(0.2)


def _wait_for_login(sandbox: Sandbox, host: SandboxHost, container: Container, deadline: float) -> None:
    """A real login, with the key and the known host: what works here works for everyone who reads the inventory."""
    command = ["ssh", "-F", "/dev/null", *inventory.ssh_options(sandbox), "-o", "BatchMode=yes", "-o", "ConnectTimeout=5"]
    command += ["-i", str(sandbox.key), f"{sandbox.user}@{host.address}", "true"]
    while True:
        try:
            tried = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        except FileNotFoundError as failure:
            raise ProvisionError(
                "This machine has no ssh.", hint="Install the SSH client: `sudo apt-get install openssh-client`."
            ) from failure
        if tried.returncode == 0:
            return
        with container_engine.explained(f"starting {host.name}"):
            _fail_if_stopped(container)
        if time.monotonic() > deadline:
            raise ProvisionError(
                f"The host runs, but takes no login at {host.address}: {tried.stderr.strip()}",
                where=host.name,
                hint="The engine must run on this machine itself (see DOCKER_HOST), with no firewall before its networks.",
            )
        time.sleep(0.2)


def _fail_if_stopped(container: Container) -> None:
    container.reload()
    if container.status != "running":
        raise ProvisionError(f"The host stopped right after its start: {_last_lines(container)}", where=container.labels[names.HOST])


def _last_lines(container: Container) -> str:
    lines = container.logs(tail=5).decode(errors="replace").strip().splitlines()
    return " / ".join(lines) or "it said nothing"


def _as_it_is(client: DockerClient, name: str, wanted: list[str], sudo: SudoMode, slots: int, say: Say) -> Sandbox:
    """The sandbox that is already there, if it is the one that was asked for and it is well."""
    with container_engine.explained(f"looking at sandbox {name}"):
        containers = sweep.hosts(client, name)
        sandbox = _sandbox(name, [_host(container) for container in containers])
        same = [host.base for host in sandbox.hosts] == wanted and all(one.labels.get(names.SUDO) == sudo for one in containers)
        if same and sandbox.running and sandbox.inventory.exists() and sandbox.key.exists():
            deadline = time.monotonic() + START_SECONDS
            for host, container in zip(sandbox.hosts, containers, strict=True):
                _wait_for_login(sandbox, host, container, deadline)
            sandbox.inventory.write_text(inventory.render(sandbox, slots), encoding="utf-8")
            say(f"sandbox {name} is up already")
            return sandbox
    told = ", ".join(f"{host.name} ({host.base}, {host.state})" for host in sandbox.hosts) or "the remains of one that was interrupted"
    command = "provision sandbox down" + (f" --name {name}" if name != "default" else "")
    raise ProvisionError(f"There is another sandbox '{name}': {told}.", hint=f"Remove it first: `{command}`.")


def _exists(client: DockerClient, name: str) -> bool:
    with container_engine.explained(f"looking for sandbox {name}"):
        label = f"{names.LABEL}={name}"
        networks = client.networks.list(filters={"label": label})
        containers = client.containers.list(all=True, filters={"label": label}, ignore_removed=True)
        return names.folder(name).exists() or bool(networks or containers)


def _host(container: Container) -> SandboxHost:
    container.reload()
    networks = container.attrs["NetworkSettings"]["Networks"].values()
    address = next((one["IPAddress"] for one in networks if one["IPAddress"]), "")
    labels = container.labels
    return SandboxHost(labels[names.HOST], address, str(container.name), labels[names.BASE], container.status)


def _sandbox(name: str, hosts: list[SandboxHost]) -> Sandbox:
    folder = names.folder(name)
    password = folder / "become_password"
    return Sandbox(
        name=name,
        hosts=hosts,
        inventory=folder / inventory.FILE,
        user=names.USER,
        key=folder / "id_ed25519",
        known_hosts=folder / "known_hosts",
        become_password=password if password.exists() else None,
    )


def _write_private(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)


@contextmanager
def _engine() -> Iterator[DockerClient]:
    client = container_engine.connect()
    try:
        yield client
    finally:
        client.close()


@contextmanager
def _only_one(name: str) -> Iterator[None]:
    with process_locks.acquired(names.lock(f"sandbox-{name}"), LOCK_SECONDS) as mine:
        if not mine:
            raise ProvisionError(f"Another process is making or removing sandbox '{name}'.", hint="Wait for it, or end it, then try again.")
        yield
