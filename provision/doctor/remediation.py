"""`doctor --fix`: which findings can be fixed by themselves, with what, and the run through Ansible that does it.

What is fixed by small tasks has a file of them, ``playbooks/fix/ID.yml``; what an installation fixes by itself is left to
`provision up`. Nothing here reboots a host or takes a driver off.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

import yaml

from provision.base import resources
from provision.base.errors import ProvisionError
from provision.commands import lifecycle
from provision.diagnosis.findings import Finding
from provision.doctor.host_checks import Look
from provision.facts import Facts
from provision.facts.model import Limits
from provision.inventory import Inventory
from provision.plan.options import Options
from provision.plan.requirements import OpenMpiSource
from provision.remote import host_locks
from provision.remote.ansible import Event
from provision.remote.session import Interrupted, Session
from provision.survey import installed

# Of the small tasks, those that need no root.
WITHOUT_ROOT = frozenset(("ssh-permission-denied",))

# Fixed by bringing the hosts to the plan again, where something of ours is installed.
BY_INSTALLING = frozenset(
    (
        "engine-not-built",
        "engine-other-python",
        "engine-differs",
        "torch-differs",
        "python-version-differs",
        "remote-python-env",
        "ompi-version-mismatch",
        "orte-unpack-past-end",
        "cuda-driver-insufficient",
        "btl-tcp-docker0",
        "ssh-between-hosts",
        "ssh-host-key-changed",
        "ssh-host-key-verification",
    )
)


@dataclass
class Treatment:
    """What will be done.

    Attributes:
        tasks: host → ids whose tasks run there.
        install: hosts are brought to the plan again, because of these ids.
        left: findings that nothing automatic fixes.
    """

    tasks: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    install: list[str] = field(default_factory=list)
    left: list[Finding] = field(default_factory=list)

    @property
    def anything(self) -> bool:
        return bool(self.tasks or self.install)

    def lines(self) -> list[str]:
        """What will run, for people who are asked whether it may."""
        said = [f"{host}: {name}: {task}" for host, names in sorted(self.tasks.items()) for name in names for task in _titles(name)]
        if self.install:
            said.append(f"all hosts: the installation again, as `provision up --no-smoke` does ({', '.join(self.install)})")
        return said


def treatment(look: Look) -> Treatment:
    """What can be done about the findings. Pure, but for reading which tasks there are."""
    made = Treatment()
    installed = {name for name, facts in look.facts.items() if facts.installed.manifest}
    for finding in look.findings:
        if finding.id in BY_INSTALLING and installed and finding.host in look.facts:
            if finding.id not in made.install:
                made.install.append(finding.id)
        elif _tasks(finding.id).is_file() and _may(look.facts.get(finding.host or ""), finding.id):
            made.tasks[str(finding.host)].append(finding.id)
        else:
            made.left.append(finding)
    return made


@dataclass(frozen=True)
class Remediation:
    """What became of one thing that was to be done: on a host, or on all of them (``host`` is empty)."""

    host: str
    id: str
    state: Literal["done", "failed", "not tried"]
    why: str = ""


def fix(inventory: Inventory, session: Session, look: Look, made: Treatment, passwords: Mapping[str, str]) -> list[Remediation]:
    """Do all of it, whatever fails, and say what became of each."""
    results: list[Remediation] = []
    if made.tasks:
        events: list[Event] = []

        def note(event: Event) -> None:
            events.append(event)
            session.progress.event(event)

        try:
            with host_locks.every_host(inventory, "provision doctor --fix"):
                session.play(
                    resources.folder("playbooks") / "fix.yml",
                    "Fix",
                    hosts=sorted(made.tasks),
                    extra_vars={"provision_fix": {host: _variables(look.facts[host], names) for host, names in made.tasks.items()}},
                    on_event=note,
                )
            results += [result for host, names in sorted(made.tasks.items()) for result in became(host, names, events)]
        except Interrupted:
            raise
        except ProvisionError as error:  # somebody else works on the hosts
            results += [Remediation(host, name, "not tried", str(error)) for host, names in sorted(made.tasks.items()) for name in names]
    if made.install:
        try:
            report = lifecycle.up(inventory, _as_installed(look), session.progress, passwords)
            why = "; ".join(f"{failure.host}: {failure.what}" for failure in report.failures)
        except Interrupted:
            raise
        except ProvisionError as error:
            why = str(error)
        results += [Remediation("", name, "failed" if why else "done", why) for name in made.install]
    return results


def became(host: str, names: Sequence[str], events: Sequence[Event]) -> list[Remediation]:
    """What the events of the run say of the errors that were to be fixed on a host, in their order. Pure."""
    mine = [event for event in events if event.host == host]
    failed: dict[str, str] = {}
    for event in mine:
        if event.kind in ("failed", "unreachable"):
            failed.setdefault(_id_of(event), event.text)
    began = {_id_of(event) for event in mine}
    found = []
    for name in names:
        if name in failed:
            found.append(Remediation(host, name, "failed", failed[name]))
        elif name in began:
            found.append(Remediation(host, name, "done"))
        else:
            found.append(Remediation(host, name, "not tried", next(iter(failed.values()), "the run ended before it")))
    return found


def _id_of(event: Event) -> str:
    """The error whose tasks an event is of: their file's name."""
    return Path(event.path.rpartition(":")[0]).stem


def _as_installed(look: Look) -> Options:
    """The options that lead to what the hosts hold already."""
    held = list(installed.plans(look.facts))
    torch = next((host.torch.version for host in held if host.torch), None)
    source = next((host.openmpi.source for host in held), "auto")
    openmpi = cast(OpenMpiSource, source if source in get_args(OpenMpiSource) else "auto")
    return Options(torch=torch is not None, torch_version=torch and torch.split("+")[0], openmpi=openmpi, smoke=None)


def _variables(facts: Facts, names: Sequence[str]) -> dict[str, Any]:
    """What the tasks may need to know of the host."""
    nofile, memlock = (facts.limits.get(name, Limits()).hard for name in ("nofile", "memlock"))
    return {
        "ids": list(names),
        "venv": facts.installed.venv.path,
        "hostname": facts.hostname,
        "address": facts.network.ssh_connection.server_address,
        "home": facts.user.home,
        "nccl": facts.packages.get("libnccl2"),
        # A limit above what the container itself has would make every later login fail.
        "memlock": memlock if facts.container else "unlimited",
        "nofile": min(65536, nofile) if isinstance(nofile, int) else 65536,
        "ssh_files": [file.model_dump() for file in facts.ssh.files],
        "open_mpi": next((each.path.rpartition("/")[0] for each in facts.mpi.found if each.flavour == "openmpi"), None),
    }


def _may(facts: Facts | None, name: str) -> bool:
    """Whether the tasks for this error can run on a host."""
    return facts is not None and (facts.user.can_become or name in WITHOUT_ROOT)


def _tasks(name: str) -> Path:
    return resources.folder("playbooks") / "fix" / f"{name}.yml"


def _titles(name: str) -> list[str]:
    return [task["name"] for task in yaml.safe_load(_tasks(name).read_text(encoding="utf-8"))]
