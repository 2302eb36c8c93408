"""The session of one run: its id, folder, passwords and progress; it runs playbooks, and ends on the hosts what the run has started."""

from __future__ import annotations

import getpass
import json
import os
import re
import secrets
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Annotated, Literal

from pydantic import AwareDatetime, BaseModel, Field

from provision.base import paths, resources, run_folders, signals
from provision.base.errors import Interrupted, ProvisionError, as_provision_error
from provision.base.process_locks import acquired
from provision.catalog import Catalog, overlay
from provision.inventory import Inventory, last_run
from provision.remote import ansible, ssh, timeline
from provision.remote.ansible import Event, Outcome, Play
from provision.remote.progress import Progress

RECORD = "run.json"
_LONGEST_ERROR = 10_000  # letters that are recorded


class Record(BaseModel):
    """What every run writes into its folder when it begins (`RECORD`), and completes when it is closed.

    Attributes:
        command: the command that it is a run of, e.g. ``provision up``; empty where the caller did not say.
        inventory: its file, or the hosts as they were typed.
        exit_code: of the program, where the run is one of `provision run`; else of the command, as far as the run decides it.
        error: what ended the run early.
        ranks: host → how many ranks of the run's job it got, in the order of the ranks; empty where there is no job, or that is not known.
    """

    schema_number: Literal[1] = Field(1, alias="schema")
    command: str
    inventory: str
    began: AwareDatetime
    seconds: float | None = None
    exit_code: int | None = None
    error: str = ""
    ranks: dict[str, Annotated[int, Field(ge=0, le=100_000)]] = {}


#: As `new_run_id` makes it: what is none may be anything, as where a host says it.
RUN_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{7}")


def new_run_id(now: float) -> str:
    """An id of its own for a run that begins at ``now`` (seconds since the epoch): ids sort by time, and runs of one second, too."""
    begin = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    return f"{begin}-{int(now % 1 * 4096):03x}{secrets.token_hex(2)}"


@dataclass
class Session:
    """The context of one run; as a context manager it is closed however the run ends.

    Attributes:
        run_id: marks every process of the run as ``PROVISION_RUN_ID``; also the name of the run folder.
        folder: logs, the rendered playbook and the report.
        passwords: ``become`` and ``connection``, as far as the user typed them; never written anywhere.
        step: the run's current step; a failure is reported for it.
        timeline: when steps ran on each host.
        privileged: the hosts where steps may run as root, as the survey has found out.
        interpreters: host → the Python that the survey ran on: what Ansible would choose need not run.
        locks_hosts: whether playbooks of this run lock the hosts.
        command: the command that this is a run of, for the record.
        catalog: by default ours with the user's own files over it.
        locks_left: whether a host may still have this run's lock.
    """

    inventory: Inventory
    progress: Progress
    passwords: Mapping[str, str] = field(default_factory=dict)
    run_id: str = field(default_factory=lambda: new_run_id(time.time()))
    locks_hosts: bool = False
    command: str = ""
    catalog: Catalog = field(default_factory=overlay.own)

    def __post_init__(self) -> None:
        self.folder = paths.runs() / self.run_id
        try:
            self.folder.mkdir(parents=True, mode=0o700)
        except OSError as error:
            what = f"the state folder cannot be written: {error.strerror}"
            raise ProvisionError(what, where=str(self.folder), hint="choose another one: PROVISION_HOME=DIR") from error
        draft = paths.runs() / f".latest-{self.run_id}"  # renamed into place: two runs may start at the same time
        draft.symlink_to(self.run_id)
        draft.replace(paths.runs() / "latest")
        self.step = "survey"
        self.timeline = timeline.Recorder(self.folder)
        self.progress.keep(self.folder)
        self.locks_left = False
        self.privileged: set[str] = set()
        self.interpreters: dict[str, str] = {}
        self._record = self.folder / "controller.json"
        self._lock = ExitStack()
        file = self._lock.enter_context(acquired(self._record, wait=10))
        if file is None:
            raise ProvisionError("the record of this run is locked by another process", where=str(self._record))
        json.dump({"machine": socket.gethostname()}, file)
        file.flush()
        self.record = Record(
            command=self.command, inventory=last_run.identity(self.inventory), began=datetime.now(timezone.utc).replace(microsecond=0)
        )
        self._write_record()

    def _write_record(self) -> None:
        self.write(RECORD, self.record.model_dump(mode="json", by_alias=True))

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self.locks_left = self.locks_left or (self.locks_hosts and kind is not None)
        if error is not None:
            self.record_error(error)
        with signals.deferred():
            self.close()
        if kind is KeyboardInterrupt:  # between two steps
            raise Interrupted("interrupted", hint=self._how_to_go_on()) from None

    def record_error(self, error: BaseException) -> None:
        """Note what ends the run early in its record, of which a page is made before the session ends."""
        failure = as_provision_error(error)
        self.record.exit_code, self.record.error = failure.exit_code, str(failure)[:_LONGEST_ERROR]
        with suppress(OSError):  # a full disk must not hide the error
            self._write_record()

    def close(self) -> None:
        """End the run. Where a host may still have its lock, the run is recorded as dead, as one that was killed."""
        self.record.seconds = round(time.monotonic() - self.timeline.began, 3)
        with suppress(OSError):  # a full disk must not keep the locks
            self._write_record()
        if not self.locks_left:
            self._record.unlink(missing_ok=True)
        self._lock.close()

    @property
    def owner(self) -> str:
        """Who runs this, for the message to others who find a host locked."""
        return f"{getpass.getuser()} on {socket.gethostname()} (pid {os.getpid()})"

    def _python(self, name: str) -> str:
        """The Python that runs on a host."""
        path = self.interpreters.get(name) or str(self.inventory.host(name).variables.get("ansible_python_interpreter"))
        return path if path.startswith("/") else "python3"

    @property
    def _of_hosts(self) -> dict[str, object]:
        """The variables of every playbook that say how to work on the hosts."""
        known = {host.name: self._python(host.name) for host in self.inventory.hosts}
        return {"provision_privileged": sorted(self.privileged), "provision_interpreters": known}

    @property
    def of_locks(self) -> dict[str, object]:
        """The variables of a playbook that acquires the hosts' locks: who we are, and whose locks are taken over once they are swept."""
        dead = {"provision_dead_runs": self.dead_runs(), "provision_guard": resources.inline_command("guard.py")}
        return {"provision_owner": self.owner, **dead}

    def lock_on(self, name: str) -> str:
        """The path of a host's lock."""
        return "/run/provision.lock" if name in self.privileged else "~/.provision.lock"

    def script_on(self, name: str, script: str, *arguments: str, order: object = None) -> tuple[str, ssh.Feed]:
        """(a command that runs a script of ``hostside`` on a host, as root where steps may; its standard input with ``order`` as JSON)"""
        command = "PYTHONUTF8=1 " + resources.inline_command(script, *arguments, interpreter=shlex.quote(self._python(name)))

        def feed(pipe: IO[bytes]) -> None:
            pipe.write(json.dumps(order).encode())

        return ssh.as_root(self, name, command, feed) if name in self.privileged else (command, feed)

    def dead_runs(self) -> list[str]:
        """The latest runs of this machine that have ended or were killed: their host locks may be taken over."""
        found = []
        for record in (folder / "controller.json" for folder in run_folders.newest_first()[:1000]):
            if not record.is_file():  # it has ended, unless it is just starting: what it writes second is missing, too
                found += [record.parent.name] if (record.parent / RECORD).exists() and not record.exists() else []
                continue
            # A running one has the lock. A record that cannot be read yet is of a run that is just starting.
            with acquired(record) as file, suppress(ValueError, KeyError, TypeError):
                if file is not None and json.load(file)["machine"] == socket.gethostname():
                    found.append(record.parent.name)
        return found

    @property
    def ansible_inventory(self) -> str:
        """The value of Ansible's ``-i``: the user's own file, or for ``host1,host2`` one in the run folder."""
        if self.inventory.ansible_argument is not None:
            return self.inventory.ansible_argument
        path = self.folder / "inventory.yml"
        if not path.exists():
            path.write_text(self.inventory.as_ansible_yaml(), encoding="utf-8")
        return str(path)

    def write(self, name: str, data: object) -> Path:
        """Keep ``data`` as JSON in the run folder."""
        path = self.folder / name
        path.write_text(json.dumps(data, indent=2, sort_keys=True, default=str) + "\n", encoding="utf-8")
        return path

    def take(self, event: Event, step: str, *, quiet: bool = False) -> None:
        """Time and show what happened on a host. ``step``: where the event is of no role; ``quiet``: the caller says what has failed."""
        self.timeline.event(self.step, step, event)
        self.progress.event(event, quiet=quiet)

    def play(
        self,
        play: Play,
        title: str,
        *,
        steps: Sequence[str] = (),
        on_event: Callable[[Event], None] = lambda _event: None,
        run: Callable[..., Outcome] = ansible.run,
    ) -> Outcome:
        """Run a playbook. Raises Interrupted after Ctrl-C, when everything has been ended, and ProvisionError where Ansible itself could
        not begin.

        Args:
            steps: its roles in their order, for a view of how far it is.
            on_event: called for each event, which is shown anyway.
            run: the way to run it.
        """
        names = list(play.hosts) if play.hosts is not None else [host.name for host in self.inventory.hosts]
        self.progress.stage(title, names, steps=steps)
        workdir = self.folder / play.path.stem

        def take(event: Event) -> None:
            on_event(event)
            self.take(event, play.path.stem)

        try:
            outcome = run(
                replace(play, hosts=names, extra_vars={**self._of_hosts, **play.extra_vars}),
                self.ansible_inventory,
                workdir=workdir,
                run_id=self.run_id,
                passwords=self.passwords,
                on_event=take,
                on_poll=self.progress.waiting,
            )
        except BaseException:  # the event handler failed, e.g. because the terminal is gone: Ansible must not go on alone
            self._sweep()
            raise
        finally:
            self.timeline.save()
        self.progress.close()
        if any(result.failure and "timedout" in result.failure.result for result in outcome.hosts.values()):
            _sweep_here(self.run_id)  # Ansible gives up a task, and leaves its ssh, or command on this machine
        if outcome.interrupted:
            self.abort()
        if outcome.ended_early:
            what, hint = "ansible-playbook was ended by SIGKILL, as the kernel does where memory is short, or alike", self._how_to_go_on()
            if outcome.rc != ansible.KILLED:
                said = outcome.log.read_text(encoding="utf-8", errors="replace") if outcome.log.exists() else ""
                reason = ansible.headline(said) or f"exit code {outcome.rc}"
                what, hint = f"Ansible ended before its {'last' if outcome.hosts else 'first'} task: {reason}", f"read {outcome.log}"
            raise ProvisionError(what + (self._sweep() if outcome.hosts else ""), where=title, hint=hint)
        return outcome

    def release(self, hosts: Iterable[str]) -> list[str]:
        """End what is left of the run on hosts and release their locks; returns those of which that is not known: a host that is down keeps
        its lock."""
        self.locks_left = True
        # By another id than the run's: on one machine with two names each would end the other.
        sweeper = ssh.Visitor(self.inventory, self.passwords, f"sweep-of-{self.run_id}")
        sweeps = {name: self.script_on(name, "guard.py", self.run_id, self.lock_on(name)) for name in hosts}
        scripts, stdin = {name: script for name, (script, _) in sweeps.items()}, {name: feed for name, (_, feed) in sweeps.items()}
        with signals.as_event() as interrupted:
            answers = ssh.look(sweeper, scripts, interrupted, dict.fromkeys(sweeps, ansible.ANSWER_S), stdin=stdin)
        return sorted(name for name, answer in answers.items() if answer.code != 0)

    def abort(self) -> None:
        """End every process of the run, here and on the hosts, and raise Interrupted."""
        try:
            self.progress.close()
            self.progress.line("interrupted: ending all processes of this run, here and on the hosts …", "bold")
        finally:  # Ctrl-C ends what reads the output, such as tee, too
            unknown = self._sweep()
        raise Interrupted(f"interrupted; nothing of this run is left running{unknown}", hint=self._how_to_go_on())

    def _sweep(self) -> str:
        """End every process of the run, here and on the hosts, and release their locks; names the hosts of which that is not known."""
        _sweep_here(self.run_id)
        unknown = self.release(host.name for host in self.inventory.hosts)
        return f"; {', '.join(unknown)} could not be checked (unreachable, or interrupted again)" if unknown else ""

    def _how_to_go_on(self) -> str | None:
        """Only what changes hosts finds its finished steps again."""
        return "run the same command again: it goes on where it stopped" if self.locks_hosts else None


def _sweep_here(run_id: str) -> None:
    """End every process of a run on this machine."""
    with signals.as_event():  # a second Ctrl-C must not stop the cleanup half-way
        subprocess.run([sys.executable, "-c", resources.script("guard.py"), run_id], capture_output=True, check=False)
