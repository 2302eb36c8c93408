"""`provision remove`: what earlier runs installed is removed from the hosts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from provision.install import removal
from provision.install.removal import HostRemoval
from provision.inventory import Inventory
from provision.remote import host_locks
from provision.remote.progress import Progress
from provision.remote.session import Session
from provision.survey import collect


def remove_installations(
    inventory: Inventory, progress: Progress, passwords: Mapping[str, str], wanted: Callable[[list[HostRemoval]], bool]
) -> list[HostRemoval]:
    """Remove what earlier runs installed, once ``wanted`` has seen what would be removed and agreed; else return that."""
    with (
        host_locks.acquired(inventory, "provision remove"),
        Session(inventory, progress, passwords, locks_hosts=True, command="provision remove") as session,
    ):
        survey = collect.survey_hosts(session)
        found = removal.remove(session, survey, dry_run=True)
        session.step = "remove"
        if any(one.state == "would remove" for one in found) and wanted(found):
            found = removal.remove(session, survey, dry_run=False)
        session.record.exit_code = 1 if any(one.bad for one in found) else 0
        return found
