"""What the last run of an inventory came to, from the reports that runs leave in the state folder."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from provision.base import paths
from provision.base.errors import UsageError
from provision.inventory import Inventory

FAILED = "@failed"
HOLDING = ("ready", "installed", "unchanged")  # states of hosts that hold what was planned for them


class _Model(BaseModel):
    model_config = ConfigDict(defer_build=True)


class _Host(_Model):
    host: str = ""
    state: str


class _Failure(_Model):
    host: str | None = None


class _Report(_Model):
    """What counts here of the report of a run (`provision.report.model`)."""

    inventory: str
    folder: str = ""
    hosts: tuple[_Host, ...]
    failures: tuple[_Failure, ...] = ()


def identity(inventory: Inventory) -> str:
    """By which a report and an inventory are known to belong together: its file, or what was typed."""
    return str(inventory.source or inventory.argument)


def failed_hosts(inventory: Inventory) -> list[str]:
    """The hosts that failed, were not reached, were kept out or not finished.

    Raises:
        UsageError: there is no such run, or none failed.
    """
    last = next((report for report in _reports() if report.inventory == identity(inventory)), None)
    if last is None:
        raise UsageError(f"--limit {FAILED}: no earlier run of this inventory is known", hint="run it without --limit")
    kept_out = {host.host for host in last.hosts if host.state in ("failed", "unreachable", "blocked", "not finished")}
    names = {failure.host for failure in last.failures} | kept_out
    found = [host.name for host in inventory.everyone if host.name in names]
    if not found:
        raise UsageError(f"--limit {FAILED}: no host failed in the last run", where=last.folder, hint="leave --limit out")
    return found


def newest_inventory() -> str | None:
    """The inventory of the newest run after which a host of it held what was planned; None where no such run is known."""
    return next((report.inventory for report in _reports() if _made_ready(report)), None)


def newest_in_vain() -> str | None:
    """The inventory of the newest run, where no host of it held after that what was planned."""
    newest = next(_reports(), None)
    return None if newest is None or _made_ready(newest) else newest.inventory


def _made_ready(report: _Report) -> bool:
    return any(host.state in HOLDING for host in report.hosts)


def _reports() -> Iterator[_Report]:
    """Newest first; without what is no report."""
    for document in written("report.json"):
        with contextlib.suppress(ValidationError):
            yield _Report.model_validate(document)


def written(name: str) -> Iterator[dict[str, Any]]:
    """What runs have left as JSON under that name, newest first; what cannot be read is of a run that is under way or was cut off."""
    for path in sorted(paths.runs().glob(f"2*/{name}"), key=lambda path: (path.stat().st_mtime_ns, path), reverse=True):
        try:
            yield json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
