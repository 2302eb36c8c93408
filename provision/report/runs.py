"""The folders that runs leave in the state folder: which runs there were, of which command and hosts, and how each ended.

Folders of runs that were cut off lack files, and files may be damaged: what cannot be read is unknown, never an error.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ValidationError

from provision.base import paths, process_locks, run_folders
from provision.base.documents import Document
from provision.base.errors import Interrupted, UsageError
from provision.base.text import few
from provision.launch import stall_watch
from provision.remote.session import RECORD, RUN_ID, Record
from provision.report.model import Report

REPORT = "report.json"
_CHOICES = 6  # runs that an error names

_Model = TypeVar("_Model", bound=BaseModel)

# ready: the training job passed · installed; …: on CPUs, as the GPUs are simulated · done: it ended well · not ready, failed: it did not ·
# running: still · interrupted: by a signal · killed: it ended without a word · unreadable: its report is not one · unknown: its folder does
# not say.
# fmt: off
Verdict = Literal["ready", "installed; GPU not verified: simulated", "done", "not ready", "failed", "running", "interrupted", "killed",
                  "unreadable", "unknown"]
# fmt: on
GOOD: tuple[Verdict, ...] = ("ready", "done")
BAD: tuple[Verdict, ...] = ("not ready", "failed", "interrupted", "killed", "unreadable")


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        id: the name of its folder, which begins with its date and time.
        command: e.g. ``provision up``; empty if unknown.
        began: in local time if only the id says it.
        inventory: its file, or the hosts as they were typed; empty if unknown.
        seconds: None if unknown.
    """

    id: str
    folder: Path
    command: str
    began: datetime | None
    inventory: str
    verdict: Verdict
    seconds: float | None

    def as_dict(self) -> Document:
        """Plain data for JSON."""
        return {**vars(self), "began": self.began.isoformat() if self.began else None, "folder": str(self.folder)}


def every() -> Iterator[Run]:
    """All runs, the newest first; a folder is read when its run is taken."""
    return map(read, run_folders.newest_first())


def find(name: str | None = None, having: Collection[str] = ()) -> Run:
    """The run with this id, or the only one whose id begins so; without a name the newest one.

    Args:
        having: without a name, the newest one that has one of these files.

    Raises:
        UsageError: there is none, or there are several.
    """
    folders = run_folders.newest_first()
    if not folders:
        raise UsageError("there is no run yet", where=str(paths.runs()), hint="provision HOSTS makes one")
    if name is None:
        taken = next((each for each in folders if not having or any((each / file).is_file() for file in having)), None)
        if taken is None:
            raise UsageError("no run has a report yet", where=str(paths.runs()), hint="provision HOSTS makes one; name another run: RUN")
        return read(taken)
    found = [each for each in folders if each.name == name] or [each for each in folders if name and each.name.startswith(name)]
    if len(found) == 1:
        return read(found[0])
    choices = few([each.name for each in found or folders], _CHOICES)
    what = f"{len(found)} runs begin with {name}" if found else f"there is no run {name}"
    raise UsageError(what, hint=f"name one of {choices} (provision runs shows them)")


def read(folder: Path) -> Run:
    """The run with this folder."""
    record = load(folder / RECORD, Record)
    has_report = (folder / REPORT).exists()
    report = load(folder / REPORT, Report) if has_report else None
    seconds = report.seconds if report else record.seconds if record else None
    return Run(
        id=folder.name,
        folder=folder,
        command=(report.command if report else "") or (record.command if record else ""),
        began=(report and report.began) or (record and record.began) or _began(folder.name),
        inventory=report.inventory if report else record.inventory if record else "",
        verdict=_verdict(folder, record, report, has_report=has_report),
        seconds=seconds if seconds is not None and 0 <= seconds < 1e9 else None,
    )


def load(path: Path, model: type[_Model]) -> _Model | None:
    """A JSON file of a run folder; None where it is missing, too large, or something else."""
    content = run_folders.content(path)
    with suppress(ValidationError):
        return model.model_validate_json(content) if content is not None else None
    return None


def stalls(run: str) -> stall_watch.Stalls:
    """The stalls and stragglers of the job of a run of this machine; none where the run, which may be any text, is not of here."""
    found = load(paths.runs() / run / stall_watch.RECORD, stall_watch.Stalls) if RUN_ID.fullmatch(run) else None
    return found or stall_watch.Stalls()


def _verdict(folder: Path, record: Record | None, report: Report | None, *, has_report: bool) -> Verdict:
    if record is not None and record.error and record.exit_code == Interrupted.exit_code:  # else it is the program's own
        return "interrupted"
    if report is not None:
        return report.verdict
    if has_report:
        return "unreadable"
    if process_locks.is_held(folder / "controller.json"):
        return "running"
    if record is None:
        return "unknown"
    if record.seconds is None:
        return "killed"
    return "failed" if record.exit_code else "done"


def _began(name: str) -> datetime | None:
    with suppress(ValueError):
        return datetime.strptime(name[:15], "%Y%m%d-%H%M%S").astimezone()
    return None
