"""Runs the steps of the rendered playbook on the hosts themselves: each costs this machine one connection, and a line for each event.

A host gets Ansible as it is installed here, the playbook and its own variables (hostside/on_host.py). What it says is data: it becomes the
same events as those of `remote.ansible`, or the host is given up.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import threading
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import distribution
from pathlib import Path
from queue import Empty, Full, Queue, SimpleQueue
from typing import IO, Any

from packaging.specifiers import SpecifierSet

from provision.base import downloads, resources, signals, terminal
from provision.base.text import counted
from provision.install import ssh_mesh
from provision.install.rollout import Rollout
from provision.remote import ansible_vars, ssh
from provision.remote.ansible import Collector, Event, Outcome, Play
from provision.remote.session import Session
from provision.survey.model import Interpreter

SILENT_S = 60.0  # a host says that it is alive six times as often
_MAX_BYTES, _MAX_EVENTS = 64 << 20, 20_000  # that a host may say in all
_MAX_WORDS = 2000  # letters of a line that is for others, or for people
_POLL_S = 0.5  # how soon an interrupt is noticed
_LONGEST_S, _AFTER_S = 86_400.0, 600.0  # until a host is given up in any case, and after it has failed
_PACKAGES = ("ansible-core", "jinja2", "markupsafe", "pyyaml", "packaging")
_FOLDERS = ("roles", "library", "module_utils")
_LEFT_OUT = re.compile(r"\.\.|ansible_test/|ansible/galaxy/|.*__pycache__/")
_OF_LOGIN = {f"ansible_{name}" for name in ("become_method", "become_exe", "become_flags", "become_user", "remote_tmp", "shell_executable")}
_ARGUMENTS = shlex.split("-i @folder@/hosts.yml -e @@folder@/shared.json -e @@folder@/own.json -e provision_told=@folder@")
# The host's own do not count.
_SETTINGS = """[defaults]
callback_plugins = @folder@/callback_plugins
local_tmp = @folder@/tmp
stdout_callback = on_host
task_timeout = 14400
timeout = 120
[connection]
pipelining = yes
[inventory]
host_pattern_mismatch = ignore
"""


def pythons(rollout: Rollout) -> dict[str, str]:
    """The Python of each host that can run Ansible as it is installed here; a host without one is left out."""
    needed = SpecifierSet(distribution("ansible-core").metadata["Requires-Python"])
    known = {name: rollout.facts[name].python for name in rollout.plan.hosts}
    own = {name: (*python.others, Interpreter(path=python.executable, version=python.version)) for name, python in known.items()}
    return {name: each.path for name in own for each in own[name] if each.path and each.version and each.version in needed}


def why_not(rollout: Rollout, variables: Mapping[str, Any], *, check: bool) -> str:
    """Why the playbook runs from here, in a sentence; empty where each host runs it itself."""
    inventory = [rollout.inventory.host(name) for name in rollout.plan.hosts]
    if check:
        return "a dry run changes nothing, and leaves nothing on a host either"
    if old := rollout.plan.hosts.keys() - pythons(rollout):
        return f"no Python on {counted(len(old), 'host')} can run Ansible"
    if any(host.connection == "local" or _OF_LOGIN & host.variables.keys() for host in inventory) or _is_set_up():
        return "a host is this machine, or the inventory or the user's settings say how Ansible works there"
    if not all(host.root for host in rollout.plan.hosts.values()):
        return "without root the lock is in the home, which hosts may share"
    if any(distribution(package).files is None for package in _PACKAGES):
        return "Ansible was not installed from wheels, so its files are not known"
    if rollout.drivers or variables["provision_nccl_local"] or variables.get("provision_torch_wheels"):
        return "a reboot, or files of many gigabytes, need a connection from here"
    parts = [*variables["provision_from_source"].values(), variables["provision_engine_builds"]]
    is_complete = all(build["sha256"] for part in parts for build in part["builds"].values())
    return "" if is_complete else "what one host builds for others comes through this machine"


def _is_set_up() -> bool:
    """Whether the user's environment or ansible.cfg says how Ansible becomes root."""
    from ansible.constants import config  # it takes a moment

    origins = (config.get_config_value_and_origin(f"DEFAULT_BECOME_{name}")[1] for name in ("EXE", "FLAGS", "METHOD", "USER"))
    return "ANSIBLE_REMOTE_TMP" in os.environ or any(origin != "default" for origin in origins)


_Orders = SimpleQueue[bytes | Path | None]


@dataclass(eq=False)
class _Target:
    """A host. ``left``: files that it has not got yet; ``record``: of its events; ``orders``: what is written to it, None at the end;
    ``said``: to the others, one after the other; ``sent``: bytes, and ``events``, by the host; ``at``: its last event; ``failed``: when;
    ``noise``: what was no message."""

    name: str
    left: dict[int, Path]
    record: Path
    orders: _Orders = field(default_factory=_Orders)
    said: list[str] = field(default_factory=list)
    heard: float = field(default_factory=time.monotonic)
    sent: int = 0
    events: int = 0
    at: Mapping[str, Any] = field(default_factory=lambda: {"task": "Run the steps"})
    failed: float = 0.0
    noise: str = ""
    is_cut_off: bool = False


class OnHosts:
    """A way to run a playbook for `Session.play`, as `remote.ansible.run` is."""

    def __init__(self, session: Session, pythons: Mapping[str, str], folder: Path) -> None:
        """``pythons``: those of the hosts; ``folder``: the rendered one, with the files that hosts may get."""
        self._session, self._pythons = session, pythons
        found = (path for path in (*folder.glob("*.tar.gz"), *(folder / "supplies").rglob("*")) if path.is_file())
        self._supplies = dict(enumerate(found))
        known = {str(path): (number, downloads.digest(path)) for number, path in self._supplies.items()}
        self._files = {"supplies.json": json.dumps(known), "ansible.cfg": _SETTINGS}

    def __call__(self, play: Play, _inventory: str, *, workdir: Path, on_event: Callable[[Event], None], **_of_session: object) -> Outcome:
        """Run it. Raises nothing for a host: that it failed is an event."""
        artifacts, printed = workdir / "artifacts/ansible", workdir / "artifacts/ansible/stdout"
        (records := artifacts / "job_events").mkdir(parents=True)
        variables = {"provision_run_id": self._session.run_id, **play.extra_vars}
        ansible_vars.write(workdir / "vars.json", variables)
        archive, typed = _archive(play.path.parent, variables), self._session.passwords.get("become")
        self._collector, self._rounds = Collector(on_event), 0
        self._lines: Queue[tuple[_Target, str | int]] = Queue(256)  # of which each may be long
        targets = [_Target(name, dict(self._supplies), records / f"{at}-host.json") for at, name in enumerate(play.hosts or ())]
        self._going, stopped, polled = dict.fromkeys(targets), threading.Event(), 0.0
        ssh.at_once()  # which raises the limit of open files

        def start() -> None:
            for target in targets:
                password = ssh.secret(self._session.inventory.host(target.name).sudo_password, typed)
                host = {"all": {"hosts": {target.name: {"ansible_connection": "local"}}}}
                own = {"own.json": ansible_vars.text(_own(variables, target.name)), "hosts.yml": json.dumps(host)}
                words = [*(["--become-password-file", "-"] if password else []), *_ARGUMENTS, f"@folder@/{play.path.name}"]
                order = {"size": len(archive), "files": {**self._files, **own}, "arguments": words, "password": password}
                begin = (json.dumps(order).encode() + b"\n", archive)
                pool.submit(self._attend, target, begin, lambda: stopped.is_set() or interrupted.is_set())
                if stopped.wait(ssh.START_S / ssh.STARTS):
                    break

        with (
            signals.as_event() as interrupted,
            ThreadPoolExecutor(len(targets) + 1) as pool,
            printed.open("w", encoding="utf-8", errors="backslashreplace") as log,
        ):
            try:
                starting = pool.submit(start)
                while self._going and not interrupted.is_set():
                    with suppress(Empty):
                        target, line = self._lines.get(timeout=_POLL_S)
                        self._end(target, line) if isinstance(line, int) else self._hear(target, line, log)
                    if time.monotonic() > polled + _POLL_S:
                        polled = time.monotonic()
                        self._session.progress.waiting()
                        if starting.done():
                            starting.result()
            finally:
                stopped.set()
        outcome = Outcome(0, self._collector.hosts, printed, interrupted.is_set())
        outcome.rc = 2 if outcome.failed else 0
        return outcome

    def _attend(self, target: _Target, begin: Sequence[bytes], stops: Callable[[], bool]) -> None:
        """Have a host run it."""

        def feed(pipe: IO[bytes], orders: _Orders) -> None:
            for part in begin:
                pipe.write(part)
            pipe.flush()
            while (item := orders.get()) is not None:
                with item.open("rb") if isinstance(item, Path) else io.BytesIO(item) as file:
                    shutil.copyfileobj(file, pipe, 1 << 20)
                pipe.flush()

        def put(what: str | int) -> None:
            while not stops():
                with suppress(Full):
                    self._lines.put((target, what), timeout=_POLL_S)
                    break

        def take(line: str) -> None:
            target.heard, target.sent = time.monotonic(), target.sent + len(line) + 1
            if line and target.sent <= _MAX_BYTES:
                put(line)

        def is_enough() -> bool:
            now = time.monotonic()
            is_late = now - target.heard > SILENT_S or now - began > _LONGEST_S or now - (target.failed or now) > _AFTER_S
            target.is_cut_off = target.is_cut_off or target.sent > _MAX_BYTES or is_late
            return target.is_cut_off or stops()

        script = resources.inline_command("on_host.py", interpreter=shlex.quote(self._pythons[target.name]))
        command = f"env PROVISION_RUN_ID={self._session.run_id} {script}"
        for _attempt in range(2):
            began = target.heard = time.monotonic()
            target.orders = orders = _Orders()
            try:
                code = ssh.stream(self._session, target.name, command, partial(feed, orders=orders), take, is_enough)
            except OSError as error:  # no ssh or sshpass here, or too many files are open
                code, target.noise = ssh.UNREACHABLE, str(error)
            orders.put(None)
            is_lost = code == ssh.UNREACHABLE and not target.events and time.monotonic() - began < ssh.CONNECT_S
            if not is_lost or is_enough():  # one lost connection does not end it
                break
        put(code)

    def _hear(self, target: _Target, line: str, log: IO[str]) -> None:
        """Act on a line of a host."""
        _, is_ours, text = line.partition(f"{ssh.ANSWER} ")
        target.events += bool(is_ours)
        if target.is_cut_off:
            return
        if not is_ours:
            target.noise = line[-500:]
            return
        try:
            message = dict(json.loads(text))
            if target.events > _MAX_EVENTS or not 0 <= float(message.get("event", {}).get("event_data", {}).get("duration") or 0) < 1e6:
                raise ValueError
            if "event" in message and not (target.failed and message["event"]["event"] in ("runner_on_failed", "runner_on_unreachable")):
                data = {**message["event"]["event_data"], "host": target.name}
                data["res"] = {key: value for key, value in data.get("res", {}).items() if key != "ansible_facts"}
                raw = {"event": message["event"]["event"], "event_data": data}
                self._collector(raw)
                target.at = data
                with target.record.open("a", encoding="utf-8") as record:
                    record.write(f"{json.dumps(raw)}\n")
                if target.name in self._collector.hosts and self._collector.hosts[target.name].failure and not target.failed:
                    target.failed = time.monotonic()
                    self._exchange()
            elif "says" in message:
                target.said.append(str(message["says"])[:_MAX_WORDS])
                self._exchange()
            elif "want" in message:
                path = target.left.pop(message["want"])  # each comes once
                target.orders.put(json.dumps({"supply": [message["want"], path.name, path.stat().st_size]}).encode() + b"\n")
                target.orders.put(path)
            elif "log" in message:
                target.noise = terminal.neutral(str(message["log"])[:_MAX_WORDS].rstrip())
                log.write(f"{target.name}: {target.noise}\n")
        except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError):
            self._fail(target, "it sent what is not an event of Ansible's")

    def _exchange(self) -> None:
        """Tell every host what all have said, once all that go on have said something."""
        going = [each for each in self._going if not each.failed]
        if going and all(len(each.said) > self._rounds for each in going):
            told = {each.name: ssh_mesh.public_key(each.said[self._rounds]) or "" for each in going}
            self._rounds, order = self._rounds + 1, json.dumps({"told": told}).encode() + b"\n"
            for each in going:
                each.orders.put(order)

    def _end(self, target: _Target, code: int) -> None:
        del self._going[target]
        if (code != 0 or target.name not in self._collector.hosts) and not target.failed:
            is_silent, is_lost = time.monotonic() - target.heard > SILENT_S, code == ssh.UNREACHABLE
            why = f"nothing has come for {SILENT_S:g} s" if is_silent else target.noise or f"exit code {code}"
            self._fail(target, "it sent too much" if target.sent > _MAX_BYTES else why, "unreachable" if is_lost else "failed")
        self._exchange()

    def _fail(self, target: _Target, why: str, kind: str = "failed") -> None:
        """Give a host up."""
        target.is_cut_off, target.failed = True, time.monotonic()
        of_event = {**target.at, "host": target.name, "duration": 0, "ignore_errors": False, "res": {"msg": why}}
        self._collector({"event": f"runner_on_{kind}", "event_data": of_event})


def _archive(playbook: Path, variables: Mapping[str, Any]) -> bytes:
    """Ansible, the playbook, and what the variables of all hosts have in common."""
    content, callbacks = io.BytesIO(), resources.folder("playbooks")
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as made:
        for file in (file for package in _PACKAGES for file in distribution(package).files or ()):
            if (file.suffix in (".py", ".yml") or file.name == "METADATA") and not _LEFT_OUT.match(str(file)):
                made.write(str(file.locate()), str(file))
        for place, pattern in ((playbook, "*.yml"), *((playbook, f"{name}/**/*") for name in _FOLDERS), (callbacks, "callback_plugins/*")):
            for path in filter(Path.is_file, place.glob(pattern)):
                made.write(path, path.relative_to(place))
        own = _own(variables, "")
        made.writestr("shared.json", ansible_vars.text({name: value for name, value in variables.items() if name not in own}))
    return content.getvalue()


def _own(variables: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The variables that are not the same for all hosts, as one host needs them."""

    def only(value: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value[name]} if name in value else {}

    def part(shares: Mapping[str, Any]) -> dict[str, Any]:
        own = {key: only(shares[key]) for key in ("homes", "words", "build_of") if key in shares}
        builds = {key: {**shares["builds"][key], "hosts": [name], "builders": []} for key in own["build_of"].values()}
        return {**shares, **own, "builds": builds}

    by_host = {"provision_manifests", "provision_openmpi_homes", "provision_locked"} & variables.keys()
    return {
        **{key: only(variables[key]) for key in by_host},
        "provision_plan": {**variables["provision_plan"], "hosts": only(variables["provision_plan"]["hosts"])},
        "provision_engine_builds": part(variables["provision_engine_builds"]),
        "provision_from_source": {recipe: part(shares) for recipe, shares in variables["provision_from_source"].items()},
    }
