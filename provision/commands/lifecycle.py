"""The main job: survey, plan, install, train, report. It strings the steps together; each step lives in a file of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from provision import catalog
from provision.base import signals
from provision.base.errors import ProvisionError, told
from provision.base.problems import Problem
from provision.base.text import some
from provision.commands.planning import index_asked, lock_before, lock_to_keep, make_plan, refuse_conflicts, upgrade
from provision.facts import Facts
from provision.install import builds, drift, installer, removal
from provision.install.bundle import using
from provision.install.bundle.archive import unpack
from provision.install.bundle.gather import Places, gather
from provision.install.installer import PackageSources
from provision.install.removal import HostRemoval
from provision.inventory import Inventory, last_run
from provision.plan import cluster_lock, lock_file
from provision.plan.model import Plan
from provision.plan.options import Options, SmokeOptions
from provision.remote import host_locks
from provision.remote.ansible import HostResult
from provision.remote.progress import Progress
from provision.remote.session import Interrupted, Session, opened
from provision.report.model import Report
from provision.report.outcomes import (
    add_blocked,
    add_conflicts,
    add_outcome,
    add_problems,
    add_unfinished,
    failure_that_ended,
    foretell,
    host_report,
)
from provision.smoke import training_job
from provision.survey import collect, installed
from provision.survey.collect import Survey


def up(inventory: Inventory, options: Options, progress: Progress, passwords: Mapping[str, str]) -> Report:
    """Make every host of the inventory ready and prove it; problems of single hosts are in the report, the others go on."""
    catalog.check()
    if options.smoke:
        training_job.check_options(inventory, options.smoke)
    locked = lock_to_keep(inventory, options)
    with _reported(inventory, "provision up", progress, passwords) as (session, report):
        session.step = "bundle"
        bundle = unpack(options.bundle, session.folder / "bundle") if options.bundle else None
        if bundle is not None:
            locked, options = bundle.lock, using.with_files_of(bundle, options)
        session.step = "survey"
        survey = collect.look(session, index=None if bundle else index_asked(options))
        add_problems(report, survey)
        usable = {name: facts for name, facts in survey.hosts.items() if name not in survey.blocked}
        not_begun = _not_begun(usable, options.first_step)
        report.failures += not_begun
        if usable and not not_begun:
            session.step = "plan"
            plan, sources = make_plan(inventory, usable, options, locked)
            session.write("plan.json", plan.as_dict())
            report.notes += [*plan.notes, *_without_apt(plan, options.apt_mirror)]
            add_conflicts(report, plan)
            if options.upgrade:
                for line in upgrade(inventory, usable, plan):
                    progress.line(line)
            if bundle is not None:
                using.refuse_incomplete(session, bundle, plan)
                builds.adopt(bundle.folder / "supplies")
                sources = replace(sources, bundle=bundle, user_files=using.with_sources_of(bundle, sources.user_files))
            if plan.hosts:
                session.step = "install"
                ready: dict[str, cluster_lock.Files] = {}
                try:
                    _make_ready(session, report, plan, usable, sources, options, ready)
                finally:
                    if not options.check and not options.first_step:  # which leaves out steps
                        _write_lock(inventory, plan, ready, report)
                if options.smoke and not options.check and not report.failures:
                    session.step = "training"
                    _add_smoke(report, session, plan, using.with_data_of(bundle, options.smoke))
                if options.first_step and not options.check:
                    report.notes.append(_WITHOUT_RECORD.format(step=options.first_step))
    return report


@contextmanager
def _reported(inventory: Inventory, purpose: str, progress: Progress, passwords: Mapping[str, str]) -> Iterator[tuple[Session, Report]]:
    """The frame of every run: the hosts are held, the report is written whatever comes, and every host has its line.

    Raises:
        ProvisionError: instead of KeyboardInterrupt, which Ctrl-C, SIGTERM and SIGHUP are between two steps.
    """
    began = time.monotonic()
    with signals.also_when_ended(), host_locks.every_host(inventory, purpose), opened(inventory, progress, passwords) as session:
        report = Report(run_id=session.run_id, folder=str(session.folder), inventory=last_run.identity(inventory))
        try:
            yield session, report
        except BaseException as error:
            add_unfinished(report, inventory)
            report.failures.append(failure_that_ended(told(error), inventory, session.step))
            progress.line(f"ended early; everything about this run: {session.folder}")
            raise
        finally:
            with signals.held_back():
                add_blocked(report, inventory)
                report.seconds = time.monotonic() - began
                session.write("report.json", report.as_dict())


_WITHOUT_RECORD = (
    "--from {step}: earlier steps were left out, so it is not written down that these hosts hold the plan, neither there nor in "
    f"{cluster_lock.NAME}; a run without --from looks at all steps and does that"
)


def _not_begun(known: Mapping[str, Facts], first: str | None) -> list[Problem]:
    """The hosts on which ``--from`` cannot begin at a step, because there is no environment."""
    if first is None or "python" in installer.steps(first):
        return []
    without = [name for name, each in known.items() if not each.installed.venv.works]
    said = f"--from {first}: the steps before it are missing here: there is no working environment in the prefix; nothing was changed"
    return [Problem("error", said, "leave --from out", host=name, where="survey") for name in without]


def _without_apt(plan: Plan, mirror: str | None) -> list[str]:
    others = [name for name, host in plan.hosts.items() if host.family != "debian"]
    return [f"{some(others)}: --apt-mirror is for Debian and Ubuntu: packages come from where they always do"] if mirror and others else []


def _make_ready(
    session: Session,
    report: Report,
    plan: Plan,
    facts: Mapping[str, Facts],
    sources: PackageSources,
    options: Options,
    ready: dict[str, cluster_lock.Files],
) -> None:
    """Run the installation where the survey does not show that there is nothing to do.

    Args:
        ready: gets each host that holds the plan, as it comes to do so, with the files that its packages came from.
    """
    manifests = installer.manifests(plan, session.inventory, facts)
    reasons = drift.reasons_to_run(plan, manifests, facts)
    if not reasons and not options.full and not options.first_step:
        session.progress.line("the survey shows that every host holds what the plan says: no step has to run (--full runs them all)")
        report.hosts += [host_report(host, HostResult()) for host in plan.hosts.values()]
        ready.update({name: facts[name].installed.files for name in plan.hosts})
        return
    for name, reason in reasons.items():
        session.progress.line(f"{name}: {reason}", "dim")
    done = installer.install(session, plan, facts, sources, ready.__setitem__, check=options.check, first=options.first_step)
    add_outcome(report, session.inventory, plan, done.outcome)
    if options.check:
        for host in report.hosts:
            result, found = done.outcome.hosts.get(host.host), facts.get(host.host)
            if result is not None and found is not None and result.failure is None:
                rewritten = not options.first_step and drift.is_rewritten(manifests[host.host], found)
                unchecked = installer.partly_checked(plan.hosts[host.host])
                foretell(host, result, unchecked, rewritten=rewritten, drifted=bool(found.drift))
    report.notes += done.fallbacks
    for name, packages in done.unlocked.items():
        said = f"{cluster_lock.NAME} did not know {', '.join(packages)}"
        report.notes.append(f"{name}: {said}: taken as the index had it, without a checksum to compare with; it is in the lock from now on")


def _write_lock(inventory: Inventory, plan: Plan, ready: Mapping[str, cluster_lock.Files], report: Report) -> None:
    """Write what the hosts in ``ready`` hold, with the files that their packages came from; of the others what was known stays."""
    if not ready:
        return
    hold = Plan({name: host for name, host in plan.hosts.items() if name in ready})
    try:
        with signals.held_back():
            lock_file.write(inventory, cluster_lock.of_plan(hold, ready, lock_before(inventory), inventory))
    except (OSError, ValueError) as error:  # a host may say anything of its files
        report.notes.append(f"provision.lock could not be written: {error}")


def smoke(inventory: Inventory, options: SmokeOptions, progress: Progress, passwords: Mapping[str, str]) -> Report:
    """The training job alone, on hosts that hold what an earlier run installed, as their manifests say."""
    training_job.check_options(inventory, options)
    with _reported(inventory, "provision smoke", progress, passwords) as (session, report):
        survey = collect.look(session)
        add_problems(report, survey)
        for name in installed.without(installed.manifests(survey.hosts)):
            report.failures.append(
                Problem("error", "nothing is installed here yet", f"provision up {inventory.argument}", host=name, where="smoke")
            )
        if not report.failures:
            plan = installed.plan(inventory, installed.manifests(survey.hosts))
            report.hosts = [host_report(host, HostResult()) for host in plan.hosts.values()]
            session.step = "training"
            _add_smoke(report, session, plan, options)
    return report


def _add_smoke(report: Report, session: Session, plan: Plan, options: SmokeOptions) -> None:
    try:
        result = training_job.run(session, plan, options)
    except Interrupted:
        raise
    except ProvisionError as error:  # the installation before it stands, and its table is still to be shown
        report.failures.append(failure_that_ended(error, session.inventory, "training"))
        return
    report.smoke = result.report
    report.smoke_summary = result.summary
    report.smoke_faults = list(result.faults)
    if not result.faults:
        for host in report.hosts:
            host.state = "ready"


def bundle(inventory: Inventory, options: Options, target: Path, progress: Progress, passwords: Mapping[str, str]) -> Survey:
    """Gather in ``target`` all that the plan needs; raises ProvisionError when something cannot be had. Returns the survey."""
    with host_locks.every_host(inventory, "provision bundle"):
        session = Session(inventory, progress, passwords)
        try:
            survey = collect.look(session)
            if survey.blocked:
                return survey
            locked = lock_to_keep(inventory, options)
            plan, sources = make_plan(inventory, survey.hosts, options, locked)
            refuse_conflicts(plan)
            places = Places(options.index_url, options.wheels, options.apt_mirror)
            gather(session, plan, survey.hosts, places, sources, target, locked)
            return survey
        finally:
            session.close()


def remove(
    inventory: Inventory,
    progress: Progress,
    passwords: Mapping[str, str],
    wanted: Callable[[list[HostRemoval]], bool],
) -> list[HostRemoval]:
    """Take off the hosts what earlier runs put there, after ``wanted`` has seen what would go and agreed; else that is what returns."""
    with host_locks.every_host(inventory, "provision remove"), opened(inventory, progress, passwords) as session:
        survey = collect.look(session)
        found = removal.remove(session, survey, dry_run=True)
        if any(one.state == "would remove" for one in found) and wanted(found):
            found = removal.remove(session, survey, dry_run=False)
        return found
