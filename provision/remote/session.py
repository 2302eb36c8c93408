"""One run: its id, folder, passwords and progress, and the one way in which playbooks are run and cleaned up after."""

from __future__ import annotations

import getpass
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from provision.base import paths, resources, signals
from provision.base.errors import ProvisionError, told
from provision.inventory import Inventory
from provision.remote import ansible
from provision.remote.ansible import Event, Outcome
from provision.remote.progress import Progress


class Interrupted(ProvisionError):
    """The user pressed Ctrl-C (or the run got SIGTERM); what it had started has been ended everywhere."""


@dataclass
class Session:
    """The context of one run.

    Attributes:
        run_id: marks every process of the run as ``PROVISION_RUN_ID``; also the name of the run folder.
        folder: logs, the rendered playbook and the report.
        passwords: ``become`` and ``connection``, as far as they were asked for; never written anywhere.
        step: where the run is, in a word; what ends it is reported for that step.
    """

    inventory: Inventory
    progress: Progress
    passwords: Mapping[str, str] = field(default_factory=dict)
    run_id: str = field(default_factory=lambda: time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(3))

    def __post_init__(self) -> None:
        self.folder = paths.runs() / self.run_id
        self.folder.mkdir(parents=True, mode=0o700)
        draft = paths.runs() / f".latest-{self.run_id}"  # renamed into place: two runs may start at the same time
        draft.symlink_to(self.run_id)
        draft.replace(paths.runs() / "latest")
        self.step = "survey"
        self.locks_left = False
        self.privileged: set[str] = set()  # hosts where the login user is or can become root, by the survey
        self._note = self.folder / "controller.json"
        self._note.write_text(json.dumps(_this_process()), encoding="utf-8")

    def close(self) -> None:
        """The run is over. Where a host may still hold its lock, because it failed, the run is noted as dead, like one that was killed."""
        if self.locks_left:
            self._note.write_text(json.dumps({**_this_process(), "started": "over"}), encoding="utf-8")
        else:
            self._note.unlink(missing_ok=True)

    @property
    def owner(self) -> str:
        """Who runs this, for those who find the hosts locked."""
        return f"{getpass.getuser()} on {socket.gethostname()} (pid {os.getpid()})"

    def dead_runs(self) -> list[str]:
        """Runs that were started on this machine and killed: what they have locked may be taken over."""
        found = []
        for note in paths.runs().glob("2*/controller.json"):
            try:
                process = json.loads(note.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue  # it is ending or starting just now
            if process["machine"] == socket.gethostname() and not _is_alive(process):
                found.append(note.parent.name)
        return found

    @property
    def ansible_inventory(self) -> str:
        """What Ansible gets behind ``-i``: the user's own file, or for ``host1,host2`` one in the run folder."""
        if self.inventory.ansible_argument is not None:
            return self.inventory.ansible_argument
        path = self.folder / "inventory.yml"
        if not path.exists():
            path.write_text(self.inventory.as_ansible_yaml(), encoding="utf-8")
        return str(path)

    def write(self, name: str, data: Any) -> Path:
        """Keep ``data`` as JSON in the run folder."""
        path = self.folder / name
        path.write_text(json.dumps(data, indent=2, sort_keys=True, default=str) + "\n", encoding="utf-8")
        return path

    def play(
        self,
        path: Path,
        title: str,
        *,
        hosts: Sequence[str] | None = None,
        extra_vars: Mapping[str, Any] | None = None,
        check: bool = False,
        on_event: Callable[[Event], None] | None = None,
    ) -> Outcome:
        """Run a playbook on ``hosts`` (default: all). Raises Interrupted after Ctrl-C, when everything has been ended."""
        names = list(hosts) if hosts is not None else [host.name for host in self.inventory.hosts]
        self.progress.stage(title, names)
        workdir = self.folder / path.stem
        try:
            outcome = ansible.run(
                path,
                self.ansible_inventory,
                workdir=workdir,
                run_id=self.run_id,
                extra_vars={"provision_privileged": sorted(self.privileged), **(extra_vars or {})},
                limit=names,
                check=check,
                passwords=self.passwords,
                on_event=on_event or self.progress.event,
            )
        except BaseException:  # whoever handles events has failed, perhaps for want of a terminal: Ansible must not go on without us
            _sweep_here(self.run_id)
            raise
        self.progress.close()
        if outcome.interrupted:
            self.abort()
        return outcome

    def release(self, hosts: Sequence[str]) -> None:
        """Give the hosts' locks back, also where a run ended before it could do that itself; a host that is down keeps its."""
        self.locks_left = True
        ansible.run(
            resources.folder("playbooks") / "release.yml",
            self.ansible_inventory,
            workdir=self.folder / "release",
            run_id=self.run_id,
            extra_vars={"provision_released_run": self.run_id, "provision_privileged": sorted(self.privileged)},
            limit=hosts,
            passwords=self.passwords,
        )

    def abort(self) -> None:
        """End what the run has started, here and on the hosts, and raise Interrupted."""
        self.progress.line("interrupted: ending what was started, here and on the hosts …", "bold")
        _sweep_here(self.run_id)
        names = [host.name for host in self.inventory.hosts]
        swept = ansible.run(
            resources.folder("playbooks") / "sweep.yml",
            self.ansible_inventory,
            workdir=self.folder / "sweep",
            run_id=f"sweep-of-{self.run_id}",
            extra_vars={
                "provision_sweep_command": resources.inline_command("guard.py", self.run_id),
                "provision_swept_run": self.run_id,
                "provision_privileged": sorted(self.privileged),
            },
            limit=names,
            passwords=self.passwords,
        )
        _sweep_here(f"sweep-of-{self.run_id}")
        self.locks_left = True
        looked_after = {name for name, result in swept.hosts.items() if result.ok and result.failure is None}
        unknown = sorted(set(names) - looked_after)
        where = f"; on {', '.join(unknown)} it could not be looked after (not reachable, or interrupted again)" if unknown else ""
        raise Interrupted(
            f"interrupted; nothing of this run is left running{where}", hint="run the same command again: it goes on where it stopped"
        )


@contextmanager
def opened(inventory: Inventory, progress: Progress, passwords: Mapping[str, str]) -> Iterator[Session]:
    """The session of a run that locks hosts, closed however the run ends. A Ctrl-C between two steps becomes an error of ours, too."""
    session = Session(inventory, progress, passwords)
    try:
        yield session
    except BaseException as error:
        session.locks_left = True  # whatever it is, it may have come while hosts were locked
        if isinstance(error, KeyboardInterrupt):
            raise told(error) from None
        raise
    finally:
        with signals.held_back():
            session.close()


def _sweep_here(run_id: str) -> None:
    """End every process on this machine that a run has started."""
    with signals.noted():  # a second Ctrl-C must not stop the tidying up half-way
        subprocess.run([sys.executable, str(resources.hostside("guard.py")), run_id], capture_output=True, check=False)


def _this_process() -> dict[str, Any]:
    """What tells this process from another that gets its number later."""
    return {"machine": socket.gethostname(), "boot": _boot_id(), "pid": os.getpid(), "started": _start_time(os.getpid())}


def _is_alive(process: Mapping[str, Any]) -> bool:
    return bool(process["boot"] == _boot_id() and process["started"] == _start_time(process["pid"]))


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _start_time(pid: int) -> str | None:
    """In clock ticks since boot, field 22 of /proc/PID/stat; None when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except OSError:
        return None
