"""A run: its stages one after the other, and a report that is left however it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Concatenate, ParamSpec, TypeVar

from provision.base import paths, signals
from provision.base.errors import Interrupted, ProvisionError, as_provision_error
from provision.catalog import Catalog
from provision.inventory import Inventory
from provision.launch.smoke import training_job
from provision.plan.model import Plan
from provision.plan.options import SmokeOptions
from provision.remote import host_locks
from provision.remote.progress import Progress
from provision.remote.session import Session
from provision.report import entries, page
from provision.report.model import Environment, Report
from provision.survey import gpu_code

_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass
class Run:
    """A run that has the hosts' locks, and what its stages add to the report."""

    session: Session
    report: Report

    def stage(self, name: str, work: Callable[Concatenate[Run, _P], _T], *arguments: _P.args, **named: _P.kwargs) -> _T:
        """The result of one stage: its tasks are timed, and its errors reported, under this name."""
        self.session.step = name
        return work(self, *arguments, **named)


@contextmanager
def started(inventory: Inventory, purpose: str, progress: Progress, passwords: Mapping[str, str], catalog: Catalog) -> Iterator[Run]:
    """A run that locks the hosts and always writes a report with a line for every host."""
    began = time.monotonic()
    with (
        signals.termination_as_interrupt(),
        host_locks.acquired(inventory, purpose),
        Session(inventory, progress, passwords, locks_hosts=True, command=purpose, catalog=catalog) as session,
    ):
        report = Report(
            run_id=session.run_id,
            folder=str(session.folder),
            inventory=session.record.inventory,
            command=purpose,
            began=session.record.began,
            environment=Environment.here(),
        )
        try:
            yield Run(session, report)
        except BaseException as error:
            session.record_error(error)
            entries.add_missing_hosts(report, inventory, "not finished")
            report.failures.append(entries.error_failure(as_provision_error(error), inventory, session.step))
            progress.line(paths.short(f"ended early; all about this run: {session.folder}"))
            raise
        finally:
            with signals.deferred():
                entries.add_missing_hosts(report, inventory, "blocked")
                report.seconds = time.monotonic() - began
                if not session.record.error:
                    session.record.exit_code = 0 if report.ok else 1
                session.write("report.json", report.as_dict())
                _write_page(session)


def _write_page(session: Session) -> None:
    """Write the run's page: only for people, so a run is never worse for it."""
    try:
        page.write(session.folder)
    except Exception as error:  # noqa: BLE001  see above
        session.progress.line(f"the page of this run cannot be written: {error}")


def train(run: Run, plan: Plan, options: SmokeOptions) -> None:
    """The last stage: the training job; an error leaves the installation's table to be shown.

    Where every host got a build for GPUs it must have trained on them, but for simulated ones, for which code is looked for all the same.
    """
    report = run.report
    for_gpus = {name: f"{host.prefix}/venv/bin/python" for name, host in plan.hosts.items() if host.torch and host.torch.for_gpus}
    report.simulated = [name for name in report.simulated if name in for_gpus]
    try:
        problems = gpu_code.check(run.session, for_gpus, package="torch")
        report.failures += [replace(each, where="training") for each in problems if each.severity == "error"]
        report.notes += [f"{each.host}: {each.what}" for each in problems if each.severity != "error"]
        if report.failures:
            return
        result = training_job.run(run.session, plan, options, on_gpus=len(for_gpus) == len(plan.hosts) and not report.simulated)
    except Interrupted:
        raise
    except ProvisionError as error:
        report.failures.append(entries.error_failure(error, run.session.inventory, "training"))
        return
    report.np = sum(run.session.record.ranks.values()) or None
    report.smoke = result.report
    report.smoke_summary = result.summary
    report.smoke_faults = list(result.faults)
    if not result.faults and not report.simulated:
        for host in report.hosts:
            host.state = "ready"
