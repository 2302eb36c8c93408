"""The frame of a run that leaves a report, however it ends."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from provision import hold, interrupts, last_run
from provision.errors import told
from provision.inventory import Inventory
from provision.outcomes import add_blocked
from provision.progress import Progress
from provision.report import Failure, Report
from provision.session import Session


@contextmanager
def run(inventory: Inventory, purpose: str, progress: Progress, passwords: Mapping[str, str]) -> Iterator[tuple[Session, Report]]:
    """The frame of every run: the hosts are held, the report is written whatever comes, and hosts that were kept out have their line."""
    began = time.monotonic()
    with interrupts.also_when_ended(), hold.every_host(inventory, purpose):
        session = Session(inventory, progress, passwords)
        report = Report(session.run_id, str(session.folder), last_run.identity(inventory))
        try:
            yield session, report
        except BaseException as error:
            said = told(error)
            report.failures.append(Failure(said.where or "controller", session.step, said.what, said.todo))
            session.locks_left |= said is not error  # a defect, or a Ctrl-C between two steps, may have come while hosts were locked
            raise
        finally:
            with interrupts.held_back():
                add_blocked(report, inventory)
                report.seconds = time.monotonic() - began
                session.write("report.json", report.as_dict())
                session.close()
