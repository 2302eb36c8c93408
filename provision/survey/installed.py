"""What hosts hold, as the manifests say that earlier runs left there: from the survey's facts, or from a quick look; else a Python with
the engine that was named, or that this machine has."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from provision.base.errors import ProvisionError
from provision.facts import Facts
from provision.inventory import Host, Inventory
from provision.plan.model import HostPlan, Plan
from provision.plan.requirements import DEFAULT_PREFIX, HOME_PREFIX
from provision.remote import ssh
from provision.remote.session import Session
from provision.survey import collect

_NO_PYTHON, _NO_ENGINE = 71, 72  # exit codes
#: A folder that only has the engine's name, as a checkout has, is no package: it has no origin.
_FIND = f'import sys, importlib.util as u; sys.exit(0 if getattr(u.find_spec("collective_core"), "origin", None) else {_NO_ENGINE})'
_TEST = f'echo "$python" >&2; [ -x "$python" ] || exit {_NO_PYTHON}; "$python" -c {shlex.quote(_FIND)}'


class NothingInstalled(ProvisionError):
    """No run of ours has come to its end on a host."""


def find(session: Session, python: str | None, timeout: float = ssh.TIMEOUT_S) -> Plan | str:
    """What a job can run with: the plan of what is installed, or the path of a Python that has the engine.

    That is ``python`` where it is given; where nothing is installed and all hosts are this machine, that of its active environment.

    Raises:
        NothingInstalled, ProvisionError: as `look` does.
    """
    if python is not None:
        check(session, python, timeout)
        return python
    try:
        return look(session, timeout)
    except NothingInstalled as error:
        if any(host.connection != "local" for host in session.inventory.hosts):
            raise NothingInstalled(error.what, where=error.where, hint=f"{error.hint}; or --python PATH of one with the engine") from None
        looked = list(_pythons_here())
        found = next((each for each in looked if _has_engine(each)), None)
        if found is None:
            what = f"{error.what}, and none of its Pythons has the engine ({', '.join(looked)})"
            hint = f"{error.hint}; or activate the environment that has it (from the sources: pip install ./collective_core)"
            raise NothingInstalled(what, where=error.where, hint=hint) from None
        return found


def _pythons_here() -> dict[str, None]:
    """Those of the active environments, the first on PATH, and the one that runs this."""
    active = [Path(os.environ[name], "bin/python") for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if os.environ.get(name)]
    on_path = [found for found in map(shutil.which, ("python3", "python")) if found]
    return dict.fromkeys([*(str(path) for path in active if path.exists()), *on_path, sys.executable])


def _has_engine(python: str) -> bool:
    return subprocess.run([python, "-c", _FIND], capture_output=True, cwd="/", check=False).returncode == 0


def look(session: Session, timeout: float = ssh.TIMEOUT_S) -> Plan:
    """What is installed on the session's hosts, by one command each and without a survey.

    Raises:
        NothingInstalled: there is nothing on a host.
        ProvisionError: a host cannot be reached, does not answer in ``timeout`` seconds, or does not hold what a job needs.
    """
    answers = ssh.run(session, {host.name: _script(host) for host in session.inventory.hosts}, timeout=timeout)
    again = f"provision up {session.inventory.argument}"
    for host in session.inventory.hosts:
        _complain(host, answers[host.name], again)
    found = {name: _read(answer) for name, answer in answers.items()}
    bare = without(found)
    if bare:
        raise NothingInstalled("nothing is installed here yet", where=", ".join(bare), hint=again)
    return plan(session.inventory, found)


def check(session: Session, python: str, timeout: float = ssh.TIMEOUT_S) -> None:
    """Whether ``python`` has the engine on all hosts. Raises ProvisionError as `look` does."""
    script = f"python={shlex.quote(python)}; {_TEST}"
    answers = ssh.run(session, {host.name: script for host in session.inventory.hosts}, timeout=timeout)
    for host in session.inventory.hosts:
        _complain(host, answers[host.name], f"install the engine there, from the sources: {python} -m pip install ./collective_core")


def _script(host: Host) -> str:
    """Prints the manifest. With and without root it is elsewhere; where there are both, the later installation counts."""
    places = [f"{folder}/manifest.json" for folder in ([host.prefix] if host.prefix else [DEFAULT_PREFIX, HOME_PREFIX])]
    newest = f"$(ls -t {shlex.join(places)} 2>/dev/null | head -n 1)"
    show = f'cd; echo; echo {ssh.ANSWER}; manifest="{newest}"; [ -n "$manifest" ] || exit 0; cat "$manifest"'
    return f"{show}; python=${{manifest%/manifest.json}}/venv/bin/python; {_TEST}"


def _complain(host: Host, answer: ssh.Answer, hint: str) -> None:
    python = answer.err.strip().rpartition("\n")[2]  # as the test says it
    if answer.code is None:
        raise ProvisionError("it did not answer in time", where=host.name, hint="try it by hand: ssh " + host.address)
    if answer.code == _NO_PYTHON:
        raise ProvisionError(f"there is no Python at {python}", where=host.name, hint=hint)
    if answer.code == _NO_ENGINE:
        raise ProvisionError(f"the engine is not installed for {python}", where=host.name, hint=hint)
    if answer.code not in (0, ssh.UNREACHABLE):
        said = answer.err.strip() or "it said nothing"
        raise ProvisionError(f"looking at it ended with exit code {answer.code}: {said}", where=host.name, hint=hint)
    if answer.code != 0:
        problem = collect.connection_problem(host, answer.err)
        raise ProvisionError(problem.what, where=host.name, hint=problem.hint)


def _read(answer: ssh.Answer) -> Any:
    text = answer.body
    try:
        return json.loads(text) if text else None
    except ValueError:
        return text  # which `plan` refuses


def manifests(known: Mapping[str, Facts]) -> dict[str, Any]:
    """Host → its manifest as it has it, of the hosts whose facts are given; None: no run has come to its end there."""
    return {name: facts.installed.manifest for name, facts in known.items()}


def without(manifests: Mapping[str, Any]) -> list[str]:
    """The hosts on which no run has come to its end."""
    return [name for name, manifest in manifests.items() if not manifest]


def plans(manifests: Mapping[str, Any]) -> Iterator[HostPlan]:
    """What the manifests say, of the hosts that have one which this version can read."""
    for name, manifest in manifests.items():
        with suppress(KeyError, TypeError, ValueError):
            yield replace(HostPlan.from_dict(manifest["host"]), name=name)


def plan(inventory: Inventory, manifests: Mapping[str, Any]) -> Plan:
    """What the manifests say, with the slots that the inventory says now, in the inventory's order.

    Raises:
        ProvisionError: a manifest cannot be read.
    """
    hosts: dict[str, HostPlan] = {}
    for name in (host.name for host in inventory.hosts if host.name in manifests):
        try:
            found = HostPlan.from_dict(manifests[name]["host"])
        except (KeyError, TypeError, ValueError) as error:
            again = f"provision up {inventory.argument}"
            raise ProvisionError("its manifest was written by another version or is damaged", where=name, hint=again) from error
        hosts[name] = replace(found, name=name, slots=inventory.host(name).slots or found.slots)
    return Plan(hosts)
