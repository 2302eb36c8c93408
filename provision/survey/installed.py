"""The installations on hosts, by their manifests: from the survey's facts, or from one quick command on each host."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from provision.base.errors import ProvisionError
from provision.inventory import Host, Inventory
from provision.plan.manifest import UNREADABLE, Manifest
from provision.plan.model import HostPlan, Plan
from provision.plan.requirements import DEFAULT_PREFIX, HOME_PREFIX
from provision.remote import ssh
from provision.remote.session import Session
from provision.survey import Facts, collect

_NO_PYTHON, _NO_ENGINE = 71, 72  # exit codes
#: A folder that only has the engine's name, as a checkout has, is not a package: it has no origin.
_FIND = f'import sys, importlib.util as u; sys.exit(0 if getattr(u.find_spec("collective_core"), "origin", None) else {_NO_ENGINE})'
_TEST = f'echo "$python" >&2; [ -x "$python" ] || exit {_NO_PYTHON}; "$python" -c {shlex.quote(_FIND)}'


class NothingInstalled(ProvisionError):
    """No run was completed on a host."""


def plans(known: Mapping[str, Facts]) -> Iterator[HostPlan]:
    """The plans in the manifests of the hosts that have one which this version can read."""
    for name, found in known.items():
        if found.installed.plan is not None:
            yield replace(found.installed.plan, name=name)


def plan(inventory: Inventory, known: Mapping[str, Facts]) -> Plan:
    """The plan in the manifests, with the slots of the inventory, in the inventory's order.

    Raises:
        ProvisionError: a manifest is missing or cannot be read.
    """
    return _plan(inventory, {name: found.installed.manifest for name, found in known.items()})


def _plan(inventory: Inventory, manifests: Mapping[str, Manifest | None]) -> Plan:
    hosts: dict[str, HostPlan] = {}
    for name in (host.name for host in inventory.hosts if host.name in manifests):
        if (manifest := manifests[name]) is None:
            raise ProvisionError(UNREADABLE, where=name, hint=f"provision up {inventory.argument}")
        hosts[name] = replace(manifest.host, name=name, slots=inventory.host(name).slots or manifest.host.slots)
    return Plan(hosts)


def find(session: Session, python: str | None, timeout: float = ssh.TIMEOUT_S) -> Plan | str:
    """What a job can run with: the installed plan, or the path of a Python that has the engine.

    That is ``python`` if it is given; where nothing is installed and all hosts are this machine, a Python of this machine.

    Raises:
        NothingInstalled, ProvisionError: as `read_plan` does.
    """
    if python is not None:
        check_python(session, python, timeout)
        return python
    try:
        return read_plan(session, timeout)
    except NothingInstalled as error:
        if any(host.connection != "local" for host in session.inventory.hosts):
            raise NothingInstalled(error.what, where=error.where, hint=f"{error.hint}; or --python PATH of one with the engine") from None
        candidates = _local_pythons()
        found = next((each for each in candidates if _has_engine(each)), None)
        if found is None:
            what = f"{error.what}, and none of its Pythons has the engine ({', '.join(candidates)})"
            hint = f"{error.hint}; or activate the environment that has it (from the sources: pip install ./collective_core)"
            raise NothingInstalled(what, where=error.where, hint=hint) from None
        return found


def _local_pythons() -> dict[str, None]:
    """Those of the active environments, the first on PATH, and the one that runs this."""
    active = [Path(os.environ[name], "bin/python") for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if os.environ.get(name)]
    on_path = [found for found in map(shutil.which, ("python3", "python")) if found]
    return dict.fromkeys([*(str(path) for path in active if path.exists()), *on_path, sys.executable])


def _has_engine(python: str) -> bool:
    return subprocess.run([python, "-c", _FIND], capture_output=True, cwd="/", check=False).returncode == 0


def read_plan(session: Session, timeout: float = ssh.TIMEOUT_S) -> Plan:
    """The plan in the manifests of the session's hosts, by one command on each and without a survey.

    Raises:
        NothingInstalled: a host has no manifest.
        ProvisionError: a host cannot be reached, does not answer in ``timeout`` seconds, or lacks what a job needs.
    """
    again = f"provision up {session.inventory.argument}"
    answers = _ask(session, {host.name: _manifest_script(host) for host in session.inventory.hosts}, timeout, again)
    if bare := [name for name, answer in answers.items() if not answer.body]:
        raise NothingInstalled("nothing is installed here yet", where=", ".join(bare), hint=again)
    return _plan(session.inventory, {name: _manifest(answer.body) for name, answer in answers.items()})


def check_python(session: Session, python: str, timeout: float = ssh.TIMEOUT_S) -> None:
    """Check that ``python`` has the engine on all hosts. Raises ProvisionError as `read_plan` does."""
    script = f"python={shlex.quote(python)}; {_TEST}"
    hint = f"install the engine there, from the sources: {python} -m pip install ./collective_core"
    _ask(session, {host.name: script for host in session.inventory.hosts}, timeout, hint)


def _manifest_script(host: Host) -> str:
    """Prints the manifest, which depends on whether root installed it; where there are both, the later one."""
    places = [f"{folder}/manifest.json" for folder in ([host.prefix] if host.prefix else [DEFAULT_PREFIX, HOME_PREFIX])]
    newest = f"$(ls -t {shlex.join(places)} 2>/dev/null | head -n 1)"
    show = f'cd; echo; echo {ssh.ANSWER}; manifest="{newest}"; [ -n "$manifest" ] || exit 0; cat "$manifest"'
    return f"{show}; python=${{manifest%/manifest.json}}/venv/bin/python; {_TEST}"


def _ask(session: Session, scripts: Mapping[str, str], timeout: float, hint: str) -> dict[str, ssh.Answer]:
    """The hosts' answers. Raises ProvisionError for the first host that failed, with ``hint`` where something is missing there."""
    answers = ssh.run(session, scripts, timeout=timeout)
    for host in session.inventory.hosts:
        answer = answers[host.name]
        python = answer.err.strip().rpartition("\n")[2]  # printed by the test
        if answer.code == ssh.UNREACHABLE:
            problem = collect.connection_problem(host, answer.err, session.catalog)
            raise ProvisionError(problem.what, where=host.name, hint=problem.hint)
        if answer.code is None:
            raise ProvisionError("it did not answer in time", where=host.name, hint="try it by hand: ssh " + host.address)
        if answer.code == _NO_PYTHON:
            raise ProvisionError(f"there is no Python at {python}", where=host.name, hint=hint)
        if answer.code == _NO_ENGINE:
            raise ProvisionError(f"the engine is not installed for {python}", where=host.name, hint=hint)
        if answer.code != 0:
            message = answer.err.strip() or "no error message"
            raise ProvisionError(f"reading its manifest ended with exit code {answer.code}: {message}", where=host.name, hint=hint)
    return answers


def _manifest(text: str) -> Manifest | None:
    try:
        return Manifest.model_validate_json(text)
    except ValidationError:
        return None
