"""What ``provision run --check-build`` prints: what the hosts' environments can do, each thing tried and not only looked up."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from provision.base import resources
from provision.base.errors import ProvisionError
from provision.inventory import Inventory
from provision.remote import shell
from provision.remote.progress import Progress
from provision.remote.session import Session
from provision.survey import installed


def look(inventory: Inventory, python: str | None, progress: Progress, passwords: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """What `hostside/build.py` says on each host. ``python``: the interpreter to ask; None asks what `installed.find` finds.

    Raises:
        ProvisionError: a host cannot be reached, or has no such environment.
    """
    session = Session(inventory, progress, passwords)
    try:
        found = installed.find(session, python)
        if isinstance(found, str):
            words = {host.name: [found] for host in inventory.hosts}
        else:
            words = {name: [f"{host.prefix}/venv/bin/python", host.mpirun] for name, host in found.hosts.items()}
        commands = {
            name: resources.inline_command("build.py", *more, interpreter=shlex.quote(interpreter))
            for name, (interpreter, *more) in words.items()
        }
        answers = shell.ask(session, commands)
    finally:
        session.close()
    said = {}
    for name, answer in answers.items():
        try:
            said[name] = json.loads(answer.out.strip().splitlines()[-1])
        except (ValueError, IndexError):
            raise ProvisionError(answer.err.strip() or "it did not say what it has", where=name) from None
    return said


def lines(host: str, found: Mapping[str, Any]) -> list[str]:
    """One host's lines, laid out as horovodrun's."""
    packages = found["packages"]

    def box(name: str, has: object, more: str = "") -> str:
        return f"    [{'X' if has else ' '}] {name}{f' {more}' if has and more else ''}"

    return [
        f"{host}: collective_core {packages['collective_core']}, Python {found['python']}",
        "  Frameworks:",
        box("PyTorch", packages["torch"], f"{packages['torch']}{', CUDA' if found['cuda'] else ''}"),
        box("NumPy", packages["numpy"], packages["numpy"]),
        "  Launchers:",
        box("own (--gloo)", packages["collective_core"]),
        box("mpirun (--mpi)", found["mpirun"] and packages["mpi4py"], f"with mpi4py {packages['mpi4py']}"),
        box("Runner", packages["cloudpickle"], f"with cloudpickle {packages['cloudpickle']}"),
    ]
