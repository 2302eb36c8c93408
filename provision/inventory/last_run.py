"""Outcome of the last run of an inventory, from the reports that runs leave in the state folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict, ValidationError

from provision.base import run_folders
from provision.base.errors import UsageError
from provision.inventory.model import Inventory

FAILED = "@failed"  # of ``--limit``: the hosts that failed in the last run
FAILED_STATES = ("failed", "unreachable", "blocked", "not finished")
_READY = ("ready", "installed", "unchanged")  # states of hosts that have what was planned for them


class _Entry(BaseModel):
    """A host of a report, or a failure, which has no state."""

    host: str | None = None
    state: str = ""


class _Report(BaseModel):
    """The part of a run's report (`provision.report.model`) that is read here."""

    model_config = ConfigDict(defer_build=True)

    inventory: str
    folder: str = ""
    hosts: tuple[_Entry, ...]
    failures: tuple[_Entry, ...] = ()

    @property
    def made_ready(self) -> bool:
        """Whether at least one host has what was planned for it."""
        return any(host.state in _READY for host in self.hosts)


def identity(inventory: Inventory) -> str:
    """What reports record of an inventory, so that they can be matched: its file, or what was typed."""
    return str(inventory.source or inventory.argument)


def failed_hosts(inventory: Inventory) -> list[str]:
    """The hosts that failed in the last run, or were unreachable, blocked or not finished.

    Raises:
        UsageError: there is no such run, or none failed.
    """
    last = next((report for report in _reports() if report.inventory == identity(inventory)), None)
    if last is None:
        raise UsageError(f"--limit {FAILED}: there is no earlier run of this inventory", hint="run it without --limit")
    failed = [host for host in last.hosts if host.state in FAILED_STATES]
    names = {entry.host for entry in (*failed, *last.failures)}
    found = [host.name for host in inventory.everyone if host.name in names]
    if not found:
        raise UsageError(f"--limit {FAILED}: no host failed in the last run", where=last.folder, hint="leave --limit out")
    return found


def newest_inventory() -> str | None:
    """The inventory of the newest run that made at least one host ready; None where there is no such run."""
    return next((report.inventory for report in _reports() if report.made_ready), None)


def newest_failed_inventory() -> str | None:
    """The inventory of the newest run, if that made no host ready."""
    newest = next(_reports(), None)
    return None if newest is None or newest.made_ready else newest.inventory


def _reports() -> Iterator[_Report]:
    """All valid reports, newest first; those of runs in progress or cut off are left out."""
    for folder in run_folders.newest_first():
        with contextlib.suppress(ValidationError):
            if (content := run_folders.content(folder / "report.json")) is not None:
                yield _Report.model_validate_json(content)
