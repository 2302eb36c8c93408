"""Fixes of findings, for `doctor --fix`: which are automatic, and the run that applies them.

Which they are is in the errors' entries (``fixed_by``): small ones are tasks of Ansible, ``playbooks/fix/ID.yml``; what an installation
repairs is left to `provision up`. Nothing here reboots a host or removes a driver.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

import yaml

from provision.base import resources
from provision.base.errors import Interrupted, ProvisionError
from provision.commands.up import make_ready
from provision.diagnosis.findings import Finding
from provision.diagnosis.signatures import known_error
from provision.doctor.host_checks import Examination
from provision.inventory import Inventory
from provision.plan.options import Options, with_earlier_sources
from provision.plan.requirements import OpenMpiSource
from provision.remote import host_locks
from provision.remote.ansible import Event, Play
from provision.remote.session import Session
from provision.survey import Facts, installed
from provision.survey.model import Limits


@dataclass
class FixPlan:
    """What `--fix` will do.

    Attributes:
        tasks: host → ids of the errors whose tasks run there.
        installation: ids of the errors for which all hosts are installed again.
        manual: findings without an automatic fix.
    """

    tasks: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    installation: list[str] = field(default_factory=list)
    manual: list[Finding] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The steps, for the user who is asked for consent; none where nothing is automatic."""
        lines = [
            f"{host}: {name}: {task['name']}"
            for host, names in sorted(self.tasks.items())
            for name in names
            for task in yaml.safe_load((resources.folder("playbooks") / "fix" / f"{name}.yml").read_text(encoding="utf-8"))
        ]
        if self.installation:
            lines.append(f"all hosts: the installation again, as `provision up --no-smoke` does ({', '.join(self.installation)})")
        return lines


def plan(examination: Examination) -> FixPlan:
    """Which findings can be fixed automatically, and how."""
    fixes = FixPlan()
    anything_installed = any(facts.installed.was_completed for facts in examination.facts.values())
    for finding in examination.findings:
        facts, fixed_by = examination.facts.get(finding.host or ""), known_error(finding.id).fixed_by
        if fixed_by == "installation" and anything_installed and facts:
            if finding.id not in fixes.installation:
                fixes.installation.append(finding.id)
        elif facts and (fixed_by == "user" or (fixed_by == "root" and facts.user.can_become)):
            fixes.tasks[str(finding.host)].append(finding.id)
        else:
            fixes.manual.append(finding)
    return fixes


@dataclass(frozen=True)
class FixResult:
    """Whether one error was fixed on a host; ``host`` is empty for all hosts."""

    host: str
    id: str
    state: Literal["done", "failed", "not tried"]
    reason: str = ""


def apply(
    fixes: FixPlan, examination: Examination, inventory: Inventory, session: Session, passwords: Mapping[str, str]
) -> list[FixResult]:
    """Apply all fixes, also after one that fails, and return the result of each."""
    results: list[FixResult] = []
    if fixes.tasks:
        events: list[Event] = []
        try:
            with host_locks.acquired(inventory, "provision doctor --fix"):
                extra = {"provision_fix": {host: _variables(examination.facts[host], names) for host, names in fixes.tasks.items()}}
                play = Play(resources.folder("playbooks") / "fix.yml", sorted(fixes.tasks), extra)
                session.play(play, "Fix", on_event=events.append)
            results += [result for host, names in sorted(fixes.tasks.items()) for result in results_on(host, names, events)]
        except Interrupted:
            raise
        except ProvisionError as error:  # another run uses the hosts
            results += [FixResult(host, name, "not tried", str(error)) for host, names in sorted(fixes.tasks.items()) for name in names]
    if fixes.installation:
        try:
            options = with_earlier_sources(inventory, _as_installed(examination, session))
            report = make_ready(inventory, options, session.progress, passwords)
            reason = "; ".join(f"{failure.host}: {failure.what}" for failure in report.failures)
        except Interrupted:
            raise
        except ProvisionError as error:
            reason = str(error)
        results += [FixResult("", name, "failed" if reason else "done", reason) for name in fixes.installation]
    return results


def results_on(host: str, names: Sequence[str], events: Sequence[Event]) -> list[FixResult]:
    """The results of the errors that were to be fixed on a host, in their order, by the events of the run. Pure."""
    failed: dict[str, str] = {}
    started = set()
    for event in events:
        if event.host == host:
            name = Path(event.path.rpartition(":")[0]).stem  # the file of an error's tasks is called by its id
            started.add(name)
            if event.kind in ("failed", "unreachable"):
                failed.setdefault(name, event.text)
    tried = {name: FixResult(host, name, "failed" if name in failed else "done", failed.get(name, "")) for name in started}
    reason = next(iter(failed.values()), "the run ended before it")
    return [tried.get(name) or FixResult(host, name, "not tried", reason) for name in names]


def _as_installed(examination: Examination, session: Session) -> Options:
    """The options that lead to what is already installed."""
    plans = list(installed.plans(examination.facts))
    torch = next((host.torch.version for host in plans if host.torch), None)
    source = next((host.openmpi.source for host in plans), "auto")
    openmpi = cast(OpenMpiSource, source if source in get_args(OpenMpiSource) else "auto")
    version = torch and torch.split("+")[0]
    return Options(torch=torch is not None or not plans, torch_version=version, openmpi=openmpi, smoke=None, catalog=session.catalog)


def _variables(facts: Facts, names: Sequence[str]) -> dict[str, Any]:
    """The variables of a host's tasks."""
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
