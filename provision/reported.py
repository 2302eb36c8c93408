"""The frame of a run that leaves a report, however it ends."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from provision import hold, interrupts, last_run
from provision.errors import told
from provision.inventory import Inventory
from provision.outcomes import add_blocked, add_unfinished, failure_that_ended
from provision.progress import Progress
from provision.report import Report
from provision.session import Session, opened


@contextmanager
def run(inventory: Inventory, purpose: str, progress: Progress, passwords: Mapping[str, str]) -> Iterator[tuple[Session, Report]]:
    """The frame of every run: the hosts are held, the report is written whatever comes, and every host has its line.

    Raises:
        ProvisionError: instead of KeyboardInterrupt, which Ctrl-C, SIGTERM and SIGHUP are between two steps.
    """
    began = time.monotonic()
    with interrupts.also_when_ended(), hold.every_host(inventory, purpose), opened(inventory, progress, passwords) as session:
        report = Report(session.run_id, str(session.folder), last_run.identity(inventory))
        try:
            yield session, report
        except BaseException as error:
            add_unfinished(report, inventory)
            report.failures.append(failure_that_ended(told(error), inventory, session.step))
            progress.line(f"ended early; everything about this run: {session.folder}")
            raise
        finally:
            with interrupts.held_back():
                add_blocked(report, inventory)
                report.seconds = time.monotonic() - began
                session.write("report.json", report.as_dict())
