"""Removal of what earlier runs have installed, by the record on each host: first a dry run, then, if confirmed, the removal."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Literal

from pydantic import BaseModel

from provision.base import resources
from provision.base.documents import Document
from provision.base.errors import ProvisionError
from provision.base.problems import Problem
from provision.inventory import Host
from provision.remote import ssh
from provision.remote.ansible import TASK_S
from provision.remote.session import Session
from provision.survey import Facts, collect
from provision.survey.collect import Survey
from provision.survey.document import parse_answer
from provision.survey.preflight import why_no_root

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
    hosts = {host.name: host for host in session.inventory.hosts if host.name in survey.hosts}
    lock = {"run": session.run_id, "owner": session.owner, "dead": session.dead_runs(), "guard": resources.inline_command("guard.py")}
    scripts: dict[str, str] = {}
    stdin: dict[str, ssh.Feed] = {}
    for name, host in hosts.items():
        prefix = collect.prefix_of(host, survey.hosts[name])
        parts = [(f"{prefix}/record.json", prefix), (HOME_RECORD, None)]
        order = {"lock": {**lock, "path": session.lock_on(name)}, "dry_run": dry_run, "parts": parts}
        scripts[name], stdin[name] = session.script_on(name, "remove.py", order=order)
    title = "Remove (dry run)" if dry_run else "Remove"
    session.progress.stage(title, list(hosts))
    answers = ssh.run(session, scripts, stdin=stdin, timeout=TASK_S, task=title)
    session.progress.close()
    session.timeline.save()
    found = [
        _host(session, host.name, answers[host.name], dry_run)
        if host.name in hosts
        else HostRemoval(host.name, "unreachable", problem=next(each for each in survey.problems if each.host == host.name))
        for host in session.inventory.hosts
    ]
    for one in found:
        if one.host in hosts:
            add_other_prefixes(one, hosts[one.host], survey.hosts[one.host], dry_run=dry_run)
    if unsure := [name for name, answer in answers.items() if answer.code != 0]:
        session.release(unsure)
    session.write("removal.json", as_dict(found))
    return found


def as_dict(removals: list[HostRemoval]) -> Document:
    """``{"schema": 1, "ok": …, "hosts": [{"host", "state", "removed", "left", "problem"}]}``"""
    hosts = [{**asdict(one), "problem": one.problem.as_dict() if one.problem else None} for one in removals]
    return {"schema": 1, "ok": not any(one.bad for one in removals), "hosts": hosts}


def _host(session: Session, name: str, answer: ssh.Answer, dry_run: bool) -> HostRemoval:
    found = HostRemoval(name)
    if answer.code == ssh.UNREACHABLE:
        message = answer.err or answer.error
        found.state, found.problem = "unreachable", collect.connection_problem(session.inventory.host(name), message, session.catalog)
    elif answer.code != 0:
        found.fail(answer.error)
    said, *parts = answer.out.split(BEGIN)
    for part in [*[said] * (0 if found.bad else 2 - len(parts)), *(BEGIN + part for part in parts)]:
        try:
            answered = parse_answer(_Answer, part, BEGIN, "the removal")
        except ProvisionError as error:
            found.fail(error.what, error.hint)
            continue
        found.removed += [one for one in answered.removed if one not in found.removed]  # both parts look for what is abandoned
        found.left += answered.left
        if answered.error:
            found.fail(answered.error, "fix it, then run the same command again: it goes on where it stopped")
        elif not answered.nothing and found.state == "nothing to do":
            found.state = "would remove" if dry_run else "removed"
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
