"""`provision run --check-build`: what the hosts' environments can do; each package is imported, not only looked up."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from pydantic import BaseModel, ValidationError

from provision.base import resources
from provision.base.errors import ProvisionError
from provision.inventory import Inventory
from provision.remote import ssh
from provision.remote.progress import Progress
from provision.remote.session import Session
from provision.survey import installed


class _Build(BaseModel, strict=True):
    """What `hostside/build.py` prints on a host."""

    python: str
    packages: dict[str, str | None]
    mpirun: bool
    cuda: bool
    hip: str | None


def check(inventory: Inventory, python: str | None, progress: Progress, passwords: Mapping[str, str]) -> list[str]:
    """The lines to print, laid out as horovodrun's. ``python``: the interpreter to check; None checks what `installed.find` finds.

    Raises:
        ProvisionError: a host cannot be reached, or has no such environment.
    """
    with Session(inventory, progress, passwords, command="provision run --check-build") as session:
        found = installed.find(session, python)
        if isinstance(found, str):
            words = {host.name: [found] for host in inventory.hosts}
        else:
            words = {name: [f"{host.prefix}/venv/bin/python", host.mpirun] for name, host in found.hosts.items()}
        commands = {
            name: f"echo {ssh.ANSWER}; " + resources.inline_command("build.py", *more, interpreter=shlex.quote(interpreter))
            for name, (interpreter, *more) in words.items()
        }
        answers = ssh.run(session, commands)
        lines = []
        for name, answer in answers.items():
            try:
                lines += _lines(name, _Build.model_validate_json(answer.body))
            except (ValidationError, KeyError):
                raise ProvisionError(answer.err.strip() or "it did not say what it has", where=name) from None
        return lines


def _lines(host: str, build: _Build) -> list[str]:
    packages = build.packages

    def box(name: str, has: object, more: str = "") -> str:
        return f"    [{'X' if has else ' '}] {name}{f' {more}' if has and more else ''}"

    return [
        f"{host}: collective_core {packages['collective_core']}, Python {build.python}",
        "  Frameworks:",
        box("PyTorch", packages["torch"], f"{packages['torch']}{(f', HIP {build.hip}' if build.hip else ', CUDA') if build.cuda else ''}"),
        box("NumPy", packages["numpy"], packages["numpy"] or ""),
        "  Launchers:",
        box("own (over ssh)", packages["collective_core"]),
        box("mpirun (--mpi)", build.mpirun and packages["mpi4py"], f"with mpi4py {packages['mpi4py']}"),
        box("Runner", packages["cloudpickle"], f"with cloudpickle {packages['cloudpickle']}"),
    ]
