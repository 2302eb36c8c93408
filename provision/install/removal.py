"""Removal of what earlier runs have installed, by the record on each host: first a dry run, then, if confirmed, the removal."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass, field
from typing import Literal

from pydantic import BaseModel

from provision.base import resources
from provision.base.documents import Document
from provision.base.errors import ProvisionError
from provision.base.problems import Problem
from provision.inventory import Host
from provision.remote.ansible import Event, Play
from provision.remote.session import Session
from provision.survey import END, Facts, collect, parse_answer, why_no_root
from provision.survey.collect import Survey

BEGIN = "===PROVISION-REMOVED-BEGIN==="  # as hostside/remove.py writes it
HOME_RECORD = "~/.provision-record.json"

State = Literal["removed", "would remove", "nothing to do", "failed", "unreachable"]


@dataclass
class HostRemoval:
    """One host: what was (or would be) removed, what stays and why, and what prevented the removal."""

    host: str
    state: State = "nothing to do"
    removed: list[str] = field(default_factory=list)
    left: list[dict[str, str]] = field(default_factory=list)
    problem: Problem | None = None

    @property
    def bad(self) -> bool:
        return self.problem is not None

    def fail(self, what: str, hint: str | None = None, id: str = "removal-failed") -> None:
        """Note that the host keeps something that it should not."""
        self.state, self.problem = "failed", Problem("error", what, hint, host=self.host, where="remove", id=id)


class _Answer(BaseModel):
    """What hostside/remove.py prints."""

    nothing: bool
    removed: list[str]
    left: list[dict[str, str]]
    error: str | None


def remove(session: Session, survey: Survey, *, dry_run: bool) -> list[HostRemoval]:
    """Remove what the hosts' records name; with ``dry_run`` only report it. A host that fails does not stop the others."""
    hosts = [host for host in session.inventory.hosts if host.name in survey.hosts]
    answers: dict[str, list[str]] = {}
    failures: dict[str, Event] = {}

    def note(event: Event) -> None:
        if event.kind in ("failed", "unreachable"):
            failures.setdefault(event.host, event)
        elif (output := event.result.get("stdout")) is not None:  # of our script: no other task of this playbook has any
            answers.setdefault(event.host, []).append(str(output))

    extra = {
        "provision_prefixes": {host.name: collect.prefix_of(host, survey.hosts[host.name]) for host in hosts},
        **session.of_locks,
        "provision_remove_system": _command({"record": "@prefix@/record.json", "prefix": "@prefix@", "dry_run": dry_run}),
        "provision_remove_home": _command({"record": HOME_RECORD, "prefix": None, "dry_run": dry_run}),
    }
    play = Play(resources.folder("playbooks") / "remove.yml", [host.name for host in hosts], extra)
    session.play(play, "Remove (dry run)" if dry_run else "Remove", on_event=note)
    found = [
        _host(session, host.name, answers.get(host.name, []), failures.get(host.name), dry_run)
        if host in hosts
        else HostRemoval(host.name, "unreachable", problem=next(each for each in survey.problems if each.host == host.name))
        for host in session.inventory.hosts
    ]
    for one in found:
        if one.host in survey.hosts:
            add_other_prefixes(one, session.inventory.host(one.host), survey.hosts[one.host], dry_run=dry_run)
    if failures and not dry_run:
        session.release([host.name for host in hosts])
    session.write("removal.json", as_dict(found))
    return found


def as_dict(removals: list[HostRemoval]) -> Document:
    """``{"schema": 1, "ok": …, "hosts": [{"host", "state", "removed", "left", "problem"}]}``"""
    hosts = [{**asdict(one), "problem": one.problem.as_dict() if one.problem else None} for one in removals]
    return {"schema": 1, "ok": not any(one.bad for one in removals), "hosts": hosts}


def _host(session: Session, name: str, answers: list[str], refusal: Event | None, dry_run: bool) -> HostRemoval:
    found = HostRemoval(name)
    if refusal is not None and refusal.kind == "unreachable":
        found.state, found.problem = "unreachable", collect.connection_problem(session.inventory.host(name), refusal.text, session.catalog)
    elif refusal is not None:
        found.fail(refusal.text)
    for answer in answers:
        try:
            answered = parse_answer(_Answer, answer, BEGIN, "the removal")
        except ProvisionError as error:
            found.fail(error.what, error.hint)
            continue
        found.removed += [one for one in answered.removed if one not in found.removed]  # both scripts look for what is abandoned
        found.left += answered.left
        if answered.error:
            found.fail(answered.error, "fix it, then run the same command again: it goes on where it stopped")
        elif not answered.nothing and found.state == "nothing to do":
            found.state = "would remove" if dry_run else "removed"
    if not answers and refusal is None:
        found.fail("Ansible reported nothing about this host")
    return found


def add_other_prefixes(removal: HostRemoval, host: Host, found: Facts, *, dry_run: bool) -> None:
    """Report installations in other prefixes than the host's: as an error where the user lacks root to remove them.

    Args:
        found: the host's survey.
    """
    for prefix in found.installed.elsewhere if not removal.bad else ():
        # Next to an installation in the user's home, one of root's is another user's.
        is_ours = host.prefix is None and not found.installed.was_completed
        if is_ours and not found.user.can_become:
            needs = f"{prefix}, and all that was installed with it, stays, because its removal needs root"
            before, hint = removal.state, "run it with root: --ask-become-pass, and without provision_sudo=no in the inventory"
            removal.fail(f"{needs}: {why_no_root(found)}", hint, id="needs-root")
            if dry_run and before != "nothing to do":
                removal.state = before
        else:
            why = f"it is another installation; to remove it, name it in the inventory: provision_prefix={prefix}"
            removal.left.append({"what": prefix, "why": why})


def _command(options: Document) -> str:
    """A shell command that runs remove.py. In it the playbook replaces ``@python@``, the interpreter, and ``@prefix@`` for each host: by
    texts without a single quote, as the whole command is quoted for /bin/sh, under any login shell."""
    # Where Python is missing, nothing of ours can have run.
    absent = f"{BEGIN}\n{json.dumps({'nothing': True, 'removed': [], 'left': [], 'error': None})}\n{END}\n"
    inline = resources.inline_command("remove.py", interpreter='"$python"')
    settings = f"PYTHONUTF8=1 PROVISION_REMOVE_OPTIONS={shlex.quote(json.dumps(options))}"
    command = f"python=$(command -v @python@) || {{ printf %s {shlex.quote(absent)}; exit 0; }}; {settings} {inline}"
    return f"/bin/sh -c {shlex.quote(command)}"
