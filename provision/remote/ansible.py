"""Runs one playbook through ansible-runner and passes its events on. The only module that knows ansible-runner.

It has no retries and no texts for users. Passwords go to Ansible's prompts over a pseudo-terminal, never to disk or a command line.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from provision.base import resources, signals
from provision.remote import ansible_vars

# `tolerated`: failed, and the playbook continues with that host.
Kind = Literal["task", "started", "ok", "changed", "skipped", "tolerated", "failed", "unreachable", "waiting"]

# A host that falls silent is given up after 3 × 5 s; a lost connection must not delay the others for the kernel's two hours.
SSH_ARGUMENTS = "-o ControlMaster=auto -o ControlPersist=30s -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=3"
#: Seconds after which a host is given up: for a task that needs no work there (it may train, and be slow), and any other, as a build.
ANSWER_S, TASK_S = 120, 14_400
_POLL_S = 0.5  # how soon an interrupt is noticed
KILLED = 254  # in place of the exit code of an ansible-playbook that a signal has ended
_LARGEST_EVENT = 16 << 20  # bytes of a recorded event


@dataclass(frozen=True)
class Play:
    """What a run of a playbook does.

    Attributes:
        path: the file; roles and modules are looked for next to it.
        hosts: their names; None means all.
        extra_vars: data, never templates (see `ansible_vars`).
    """

    path: Path
    hosts: Sequence[str] | None = None
    extra_vars: Mapping[str, object] = field(default_factory=dict)
    check: bool = False


@dataclass(frozen=True)
class Event:
    """What happened to one task on one host (host is empty for ``task``, the start of a task everywhere).

    Attributes:
        path: the task's ``file:line``.
        action: its module.
    """

    kind: Kind
    host: str
    role: str
    task: str
    result: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    path: str = ""
    action: str = ""

    @property
    def report(self) -> str:
        """What a role says to the user; other modules' messages on success are about themselves."""
        return " ".join(str(self.result.get("msg", "")).split()) if self.action.rpartition(".")[2] == "debug" else ""

    @property
    def text(self) -> str:
        """The real error: a module's message, else what the command printed last."""
        result = self.result
        items = [entry for entry in result.get("results") or () if isinstance(entry, Mapping)]
        failed = [entry for entry in items if entry.get("failed") or entry.get("unreachable")]
        if failed:  # a loop: its own message is only "One or more items failed"
            result = failed[0]
        # A script has a terminal: all that it prints is in one, and the other has what ssh says.
        printing = ("stdout", "stderr") if self.action.rpartition(".")[2] == "script" else ("stderr", "stdout")
        printed = [str(result[key]).strip() for key in (*printing, "module_stderr", "module_stdout", "reason") if result.get(key)]
        message = str(result.get("msg", "")).strip()
        if "module_stdout" in result and not printed:  # no answer at all
            return f"the connection to the host ended during this task, or the task was killed there (exit code {result.get('rc')})"
        if message in ("", "non-zero return code") or "module_stdout" in result:
            return "\n".join([*printed[:1], message]).strip()
        return message


def headline(text: str) -> str:
    """The most informative line of a message, cut to 200 characters: the first one with an error, else the last."""
    lines = text.strip().splitlines() or [""]
    return next((line for line in lines if re.search(r"\berror\b|No space left", line, re.IGNORECASE)), lines[-1])[:200]


@dataclass
class Step:
    """One role on one host: tasks that ran, and of these the ones that changed something (or would)."""

    ran: int = 0
    changed: int = 0


@dataclass
class HostResult:
    """One host's count of tasks, and the event that ended its run, if one did. ``steps``: role → what happened in it, in order."""

    ok: int = 0
    changed: int = 0
    seconds: float = 0.0
    failure: Event | None = None
    steps: dict[str, Step] = field(default_factory=dict)


@dataclass
class Outcome:
    """How a playbook ended. ``interrupted`` is True after SIGINT or SIGTERM."""

    rc: int
    hosts: dict[str, HostResult]
    log: Path
    interrupted: bool = False

    @property
    def ended_early(self) -> bool:
        """Ansible did not get to its end: it was killed, or failed for another reason than a host (2, 4 and 8 are of hosts)."""
        return self.rc & ~14 != 0 or (self.rc != 0 and not self.failed)

    @property
    def failed(self) -> list[str]:
        return [name for name, result in self.hosts.items() if result.failure is not None]


class Collector:
    """Turns ansible-runner's events into ours and keeps the counts."""

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self.hosts: dict[str, HostResult] = {}
        self._on_event = on_event

    def __call__(self, raw: Mapping[str, Any]) -> bool:
        event = self._translate(raw)
        if event is not None:
            self._count(event)
            self._on_event(event)
        return True

    @staticmethod
    def _translate(raw: Mapping[str, Any]) -> Event | None:
        data = raw.get("event_data", {})
        result = data.get("res") or {}
        kinds: dict[str, Kind] = {
            "playbook_on_task_start": "task",
            "runner_on_start": "started",
            "runner_on_ok": "changed" if result.get("changed") else "ok",
            "runner_on_skipped": "skipped",
            "runner_on_failed": "tolerated" if data.get("ignore_errors") else "failed",
            "runner_on_unreachable": "unreachable",
            "runner_retry": "waiting",
        }
        kind = kinds.get(raw.get("event", ""))
        if kind is None:
            return None
        host = "" if kind == "task" else str(data.get("host", ""))
        task = str(data.get("task", "")).rpartition(" : ")[2]  # Ansible writes "role : task" in some events
        role, path, action = (str(data.get(key, "")) for key in ("role", "task_path", "task_action"))
        return Event(kind, host, role, task, result, float(data.get("duration") or 0.0), path, action)

    def _count(self, event: Event) -> None:
        if not event.host:
            return
        host = self.hosts.setdefault(event.host, HostResult())
        host.seconds += event.seconds
        if event.role:
            step = host.steps.setdefault(event.role, Step())
            step.ran += event.kind in ("ok", "changed", "tolerated", "failed")
            step.changed += event.kind == "changed"
        if event.kind in ("ok", "changed", "tolerated"):
            host.ok += 1
            host.changed += event.kind == "changed"
        elif event.kind in ("failed", "unreachable"):
            host.failure = host.failure or event


def recorded(workdir: Path, host: str) -> Iterator[Event]:
    """The events of a host, in order, that ansible-runner has left in the folder of a playbook; what is none is left out."""
    folder = workdir / "artifacts" / "ansible" / "job_events"
    numbered = [(int(path.name.partition("-")[0]), path) for path in folder.glob("*-*.json") if re.match(r"\d{1,9}-", path.name)]
    for _, path in sorted(numbered):
        with suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):  # what is not a mapping where one should be
            if path.is_file() and path.stat().st_size <= _LARGEST_EVENT and host.encode() in (content := path.read_bytes()):
                for line in content.splitlines():  # one; of a host that ran its steps itself all of its own
                    event = Collector._translate(json.loads(line))
                    if event is not None and event.host == host:
                        yield event


def run(
    play: Play,
    inventory: str,
    *,
    workdir: Path,
    run_id: str,
    passwords: Mapping[str, str] | None = None,
    on_event: Callable[[Event], None] = lambda _event: None,
    on_poll: Callable[[], object] = lambda: None,
) -> Outcome:
    """Run a playbook and return when it has ended.

    Args:
        inventory: value of ``ansible-playbook -i``.
        workdir: Ansible's own artifacts (log, events) go here.
        run_id: marks every process of the run, here and on the hosts, as ``PROVISION_RUN_ID``.
        passwords: ``{"become": …, "connection": …}``.
        on_event: called for each event, in order; must be quick (a slow one makes Ansible time out).
        on_poll: called about twice a second, also while nothing happens.
    """
    secrets = dict(passwords or {})
    # -i here and not as ansible-runner's inventory: it would take "a,b," for the text of a file.
    flags = ["-i", shlex.quote(inventory), "--forks", "50"]
    prompts = {}
    if "connection" in secrets:
        flags.append("--ask-pass")
        prompts[r"SSH password:\s*?$"] = secrets["connection"]
    if "become" in secrets:
        flags.append("--ask-become-pass")
        prompts[r"BECOME password.*:\s*?$"] = secrets["become"]
    if play.check:
        flags += ["--check", "--diff"]
    workdir.mkdir(parents=True, exist_ok=True)
    # In a file, not as ansible-runner's extravars: those go on the command line, where a plan of many hosts does not fit.
    variables = workdir / "vars.json"
    ansible_vars.write(variables, {"provision_run_id": run_id, **play.extra_vars})
    flags += ["-e", shlex.quote(f"@{variables}")]

    import ansible_runner  # it takes a moment, which commands without hosts save

    collector = Collector(on_event)
    with signals.as_event() as interrupted:
        # init_runner rather than run: the artifacts' folder must be known even when Ansible does not start.
        runner = ansible_runner.interface.init_runner(
            private_data_dir=str(workdir),
            project_dir=str(play.path.parent),
            playbook=str(play.path),
            ident="ansible",
            limit=",".join(play.hosts) if play.hosts is not None else None,
            cmdline=" ".join(flags),
            passwords=prompts,
            envvars={**_environment(play.path.parent, workdir, run_id), "ANSIBLE_TASK_TIMEOUT": str(TASK_S)},
            settings={"pexpect_timeout": _POLL_S, "suppress_ansible_output": True},
            suppress_env_files=True,
            quiet=True,
            event_handler=collector,
            cancel_callback=lambda: on_poll() or interrupted.is_set(),
        )
        runner.run()
    rc = KILLED if runner.rc is None else int(runner.rc)
    return Outcome(rc, collector.hosts, workdir / "artifacts" / "ansible" / "stdout", interrupted.is_set())


def _user_settings() -> dict[str, str]:
    """The user's ansible.cfg of the current folder: ansible-runner starts Ansible in another one."""
    own = Path.cwd() / "ansible.cfg"
    return {"ANSIBLE_CONFIG": str(own)} if own.is_file() and "ANSIBLE_CONFIG" not in os.environ else {}


def _ssh_settings() -> dict[str, str]:
    """Ours only where the user has none: their arguments may lead through a jump host. A connection that is lost is made once more."""
    from ansible.config.manager import find_ini_config_file  # as above

    config = find_ini_config_file()
    text = Path(os.fsdecode(config)).read_text(encoding="utf-8") if config else ""
    ours = {"ssh_args": ("ANSIBLE_SSH_ARGS", SSH_ARGUMENTS), "retries": ("ANSIBLE_SSH_RETRIES", "1")}
    return {
        variable: value
        for key, (variable, value) in ours.items()
        if variable not in os.environ and not re.search(rf"^\s*{key}\s*=", text, re.MULTILINE)
    }


def _environment(playbooks: Path, workdir: Path, run_id: str) -> dict[str, str]:
    """Ansible's settings for our runs. The user's ansible.cfg still counts for what is not named here."""
    return {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "PROVISION_RUN_ID": run_id,
        "LC_ALL": "C.UTF-8",  # Ansible refuses every locale that is not UTF-8, or not installed here
        "ANSIBLE_NOCOLOR": "1",
        "ANSIBLE_RETRY_FILES_ENABLED": "0",
        "ANSIBLE_HOST_KEY_CHECKING": "1",
        "ANSIBLE_LIBRARY": str(playbooks / "library"),
        "ANSIBLE_ROLES_PATH": str(playbooks / "roles"),
        "ANSIBLE_CALLBACK_PLUGINS": str(resources.folder("playbooks") / "callback_plugins"),
        # Connections are shared within a run and never with another: that one may have had another key, or other known hosts.
        "ANSIBLE_SSH_CONTROL_PATH": f"%(directory)s/{run_id[-6:]}-%%C",
        **_user_settings(),
        **_ssh_settings(),
        "ANSIBLE_PIPELINING": "1",
        "ANSIBLE_PYTHON_INTERPRETER": os.environ.get("ANSIBLE_PYTHON_INTERPRETER", "auto_silent"),
        "ANSIBLE_LOCAL_TEMP": str(workdir / "tmp"),
        "ANSIBLE_DEPRECATION_WARNINGS": "0",
        "ANSIBLE_DISPLAY_SKIPPED_HOSTS": "0",
    }
