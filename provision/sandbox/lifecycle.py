"""``up``, ``status`` and ``down``: how a sandbox is made and removed, whichever engine runs its hosts."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from provision.base import process_locks, signals, terminal
from provision.base.errors import ProvisionError, UsageError
from provision.base.text import counted, joined
from provision.sandbox import debootstrap, names, namespaces
from provision.sandbox.containers import container_engine, controller_settings, ssh_keys
from provision.sandbox.docker_engine import DockerEngine
from provision.sandbox.engine import Engine
from provision.sandbox.gpus import simulation
from provision.sandbox.gpus.simulation import Simulation
from provision.sandbox.host_files import Login, host_files
from provision.sandbox.model import EngineName, Sandbox, SandboxHost, Say, SudoMode
from provision.sandbox.namespaces import NamespaceEngine

#: A base that lacks packages installs them first, from a mirror that may be slow; a host that fails is noticed at once.
START_SECONDS = 600
#: A `down` may meet an `up` that is cleaning up after Ctrl-C.
LOCK_SECONDS = 30


def up(
    *,
    count: int = 2,
    base: str | Sequence[str] | None = None,
    name: str = "default",
    say: Say = terminal.say,
    sudo: SudoMode = "nopasswd",
    slots: int = 2,
    engine: EngineName | None = None,
) -> Sandbox:
    """Make a sandbox and return when every host accepts its key over SSH. What was begun is removed again if that fails.

    Args:
        count: number of hosts.
        base: image of the hosts, or several, handed out in turn; None: ``debian:12``, or this machine's own file system where hosts are
            namespaces and debootstrap cannot run.
        name: of the sandbox.
        say: called with one line for each step.
        sudo: how the ordinary user becomes root: without password, with one (written to ``become_password``), or not at all.
        slots: ranks per host, as the inventory states it.
        engine: what runs the hosts; None: the container engine if it answers, otherwise namespaces.

    Raises:
        UsageError: an invalid value.
        ProvisionError: no engine, an unavailable base, a host that does not start, or another sandbox of that name.
    """
    names.check(name)
    base_of = names.base_images(count, base)
    if slots < 1:
        raise UsageError(f"slots={slots}: slots are at least 1")
    with _locked(name), _engine(f"making sandbox {name}", _engine_of(name, engine)) as runs:
        if base is None and runs.name == "namespaces" and debootstrap.missing():
            base_of = [namespaces.THIS_MACHINE] * count
        if runs.hosts(name):
            return _existing(runs, name, base_of, sudo, slots, say)
        if names.folder(name).exists() or runs.has(name):  # the lock says that no process is making it
            say("removing what an earlier run left")
            _remove(runs, name, lambda _line: None)
        try:
            return _make(runs, name, base_of, sudo, slots, say)
        except BaseException:
            with signals.ignored():
                say("removing what was made so far")
                try:
                    with container_engine.explained(f"removing sandbox {name}"):
                        _remove(runs, name, lambda _line: None)
                except ProvisionError as failure:  # it must not hide why the removal was needed
                    say(f"not all could be removed ({failure.what}): run `{names.command('down', name)}` later")
            raise


def engine_for_hosts() -> EngineName:
    """What ``up`` makes hosts with: the container engine if it answers, otherwise namespaces. Raises ProvisionError where neither can."""
    answers, why_no_container = container_engine.engine_available()
    if answers:
        return "docker"
    if why := namespaces.missing():
        raise ProvisionError(f"{why_no_container} And {why}.")
    return "namespaces"


def status(name: str = "default") -> Sandbox | None:
    """The sandbox as it is now, each host with its state; None when there is none of that name.

    Raises:
        ProvisionError: no engine answers, or the sandbox's keys and inventory are missing.
    """
    names.check(name)
    with _engine(f"looking for sandbox {name}", _engine_of(name)) as runs:
        sandbox = Sandbox(name, runs.hosts(name), names.folder(name), runs.name)
    if sandbox.hosts and not sandbox.inventory.exists():
        if names.folder(name).exists():
            raise ProvisionError(
                f"Sandbox '{name}' is incomplete: it is still being made, or its making was interrupted.",
                hint=f"If no process makes it, remove it: `{names.command('down', name)}`.",
            )
        raise ProvisionError(
            f"Sandbox '{name}' is up, but its keys and inventory are not in {sandbox.inventory.parent}.",
            hint="Set PROVISION_HOME as it was when the sandbox was made. "
            f"If it is no longer needed, remove it: `{names.command('down', name)}`.",
        )
    return sandbox if sandbox.hosts else None


def every() -> list[Sandbox]:
    """All sandboxes of this machine that this user may see, by name. Raises ProvisionError where nothing can run hosts."""
    found = []
    also: tuple[EngineName, ...] = () if namespaces.missing() else ("namespaces",)
    for kind in {engine_for_hosts(), *also}:
        with _engine("looking for sandboxes", kind) as runs:
            found += [Sandbox(name, runs.hosts(name), names.folder(name), runs.name) for name in runs.sandboxes()]
    return sorted(found, key=lambda sandbox: sandbox.name)


def down(name: str = "default", say: Say = terminal.say) -> list[str]:
    """Remove every trace of a sandbox, also of one whose making was killed. Doing it twice does no harm.

    Returns:
        What was removed, one phrase each; empty when there was nothing.

    Raises:
        ProvisionError: no engine answers, so that containers may still exist; or another process works on the sandbox.
    """
    names.check(name)
    with _locked(name), _engine(f"removing sandbox {name}", _engine_of(name)) as runs:
        return _remove(runs, name, say)


def simulate(name: str, wanted: Simulation, say: Say = terminal.say) -> None:
    """Show GPUs and their faults on all hosts of a sandbox, instead of what they show now.

    Raises:
        UsageError: there is no such sandbox, or a host of it does not run.
        ProvisionError: a host cannot show it: no compiler here, no right to mount, or a fault that recorded outputs do not show.
    """
    names.check(name)
    with _locked(name), _engine(f"simulating GPUs in sandbox {name}", _engine_of(name)) as runs:
        hosts = runs.hosts(name)
        if not hosts or not all(host.state == "running" for host in hosts):
            raise UsageError(f"sandbox '{name}' does not run", hint=f"Start it: `{names.command('up', name)} --gpus h100:8`.")
        say(f"simulating on {counted(len(hosts), 'host')}: {wanted.gpus}" + "".join(f", {fault}" for fault in wanted.faults))
        if recorded := simulation.show(runs, name, hosts, wanted):
            why = "; ".join(dict.fromkeys(recorded.values()))
            say(
                f"nvidia-smi prints recorded outputs on {joined(sorted(recorded))}, which show faults neither of a GPU nor its links: {why}"
            )


def _make(runs: Engine, name: str, base_of: list[str], sudo: SudoMode, slots: int, say: Say) -> Sandbox:
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
    hosts = [f"node{number}" for number in range(1, len(base_of) + 1)]
    runs.create_network(name, hosts)

    images = {base: runs.image(name, base, settings, say) for base in dict.fromkeys(base_of)}
    say(f"starting {counted(len(hosts), 'host')}")
    started = []
    for host, base in zip(hosts, base_of, strict=True):
        labels = {names.BASE: base, names.SUDO: sudo}
        with container_engine.explained(f"starting {host}"):
            made = runs.start(name, host, images[base], labels, settings, lambda release: host_files(settings, release, login, hosts))
        started.append(made)

    say(f"waiting for sshd on {counted(len(hosts), 'host')}")
    deadline = time.monotonic() + START_SECONDS
    keys_of = {host.name: _host_keys(runs, host, deadline) for host in started}
    sandbox = Sandbox(name, runs.hosts(name), names.folder(name), runs.name)
    known_hosts = ssh_keys.known_hosts({(host.name, host.address): keys_of[host.name] for host in sandbox.hosts})
    sandbox.known_hosts.write_text(known_hosts, encoding="utf-8")
    sandbox.inventory.write_text(sandbox.inventory_text(slots), encoding="utf-8")
    for made in sandbox.hosts:
        _wait_for_login(runs, sandbox, made, deadline)
    return sandbox


def _existing(runs: Engine, name: str, base_of: list[str], sudo: SudoMode, slots: int, say: Say) -> Sandbox:
    """The sandbox that exists already, if it is the requested one and healthy."""
    sandbox = Sandbox(name, runs.hosts(name), names.folder(name), runs.name)
    same = [(host.base, host.sudo) for host in sandbox.hosts] == [(base, sudo) for base in base_of]
    if same and sandbox.running and sandbox.inventory.exists() and sandbox.key.exists():
        deadline = time.monotonic() + START_SECONDS
        for host in sandbox.hosts:
            _wait_for_login(runs, sandbox, host, deadline)
        sandbox.inventory.write_text(sandbox.inventory_text(slots), encoding="utf-8")
        say(f"sandbox {name} is up already")
        return sandbox
    found = ", ".join(f"{host.name} ({host.base}, {host.state})" for host in sandbox.hosts)
    raise ProvisionError(f"There is another sandbox '{name}': {found}.", hint=_other_hint(name))


def _require_running(runs: Engine, host: SandboxHost) -> None:
    if not runs.is_running(host):
        hint = "A base must be Debian or a relative of it; the packages of a minimal one come from apt's mirror: check that it answers."
        raise ProvisionError(f"The host stopped right after its start: {runs.last_lines(host)}", where=host.name, hint=hint)


def _host_keys(runs: Engine, host: SandboxHost, deadline: float) -> str:
    """The host's public keys, read without its network, where they could be forged."""
    with container_engine.explained(f"starting {host.name}"):
        while True:
            _require_running(runs, host)
            if keys := runs.public_keys(host):
                return keys
            if time.monotonic() > deadline:
                what = f"The host was not ready within {START_SECONDS} s: {runs.last_lines(host)}"
                raise ProvisionError(what, where=host.name, hint="Check that apt's mirror answers, or try again on a less loaded machine.")
            time.sleep(0.2)


def _wait_for_login(runs: Engine, sandbox: Sandbox, host: SandboxHost, deadline: float) -> None:
    """Log in as a reader of the inventory would, with the key and the known host, until it works."""
    command = ["ssh", "-F", "/dev/null", *ssh_keys.options(sandbox.known_hosts), "-o", "BatchMode=yes", "-o", "ConnectTimeout=5"]
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
            _require_running(runs, host)
        if time.monotonic() > deadline:
            raise ProvisionError(
                f"The host runs, but accepts no login at {host.address}: {tried.stderr.strip()}",
                where=host.name,
                hint="The engine must run on this machine itself (see DOCKER_HOST), without a firewall in front of its networks.",
            )
        time.sleep(0.2)


def _remove(runs: Engine, name: str, say: Say) -> list[str]:
    """Remove hosts, network, images and files of one sandbox."""
    removed: list[str] = []

    def note(what: str) -> None:
        say(f"removed {what}")
        removed.append(what)

    runs.remove(name, note)
    if names.folder(name).exists():
        shutil.rmtree(names.folder(name))
        note(f"folder {names.folder(name)}")
    for what in debootstrap.remove_partial():
        note(what)
    return removed


@contextmanager
def _engine(step: str, kind: EngineName) -> Iterator[Engine]:
    """The engine, whose failures within the block become errors about that step."""
    if kind == "namespaces" and (why := namespaces.missing()):
        raise ProvisionError(f"This machine cannot run hosts in namespaces: {why}.", hint="Use a container engine: --engine docker")
    with container_engine.explained(step):
        if kind == "namespaces":
            yield NamespaceEngine()
        else:
            with closing(container_engine.connect()) as client:
                yield DockerEngine(client)


def _engine_of(name: str, wanted: EngineName | None = None) -> EngineName:
    """What runs the hosts of that sandbox; where there is none of that name, what is wanted, else what would. Raises ProvisionError where
    another engine than the wanted one runs them."""
    found: EngineName | None = "docker" if names.folder(name).exists() else None
    if os.geteuid() == 0 and NamespaceEngine().has(name):
        found = "namespaces"
    if found and wanted and found != wanted:
        raise ProvisionError(f"There is another sandbox '{name}', made with --engine {found}.", hint=_other_hint(name))
    return found or wanted or engine_for_hosts()


def _other_hint(name: str) -> str:
    return f"Take another name (--name), or if it is no longer needed, remove it first: `{names.command('down', name)}`."


@contextmanager
def _locked(name: str) -> Iterator[None]:
    with process_locks.acquired(names.lock(f"sandbox-{name}"), LOCK_SECONDS) as lock:
        if not lock:
            raise ProvisionError(f"Another process is making or removing sandbox '{name}'.", hint="Wait for it, or end it, then try again.")
        yield
