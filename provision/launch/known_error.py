"""The known error that has ended a job, and how to fix it where the user stands."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from provision.base import run_folders
from provision.diagnosis import logs
from provision.launch.launchers import RunOptions
from provision.launch.program_files import program_at
from provision.launch.rank_output import RankTraceback
from provision.remote.session import Session

_END, _LAST = 1 << 16, 30  # bytes, and lines, of a log: what ended the job stands there, and what it has survived above
_PACKAGES = "requirements.txt"  # in an entry's remedy: the program's own list
_LISTS = ("uv.lock", "pyproject.toml", _PACKAGES)  # of packages, as --env takes them


def explained(failure: RankTraceback | None, log: Path, session: Session, options: RunOptions) -> list[str]:
    """Name and remedies, a line each, of the known error in the traceback, else in the end of the job's log; nothing without one."""
    text = "\n".join(failure.lines if failure else run_folders.tail(log, _END)[-_LAST:])
    known = logs.root_cause(text, log.name, session.catalog)
    if known is None or known.severity != "error":
        return []
    # A program that has an environment of its own, and lacks the package, needs no other one.
    fix = [step for step in known.fix if options.project is None or _PACKAGES not in step]
    hosts, packages = shlex.quote(session.inventory.argument), shlex.quote(_packages(options))
    return [f"{known.what} [{known.id}]", *(f"→ {step.replace('HOSTS', hosts).replace(_PACKAGES, packages)}" for step in fix)]


def _packages(options: RunOptions) -> str:
    """The list of packages next to the program."""
    at, _ = program_at(options.command)
    folder = "" if at is None else os.path.dirname(options.command[at])
    found = (os.path.join(folder, name) for name in _LISTS if options.workdir is None and os.path.isfile(os.path.join(folder, name)))
    return next(found, _PACKAGES)
