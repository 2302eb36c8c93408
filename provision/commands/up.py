"""`provision up`: survey, plan, install, train. Each stage is implemented in a folder of its own; this is their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from provision.base.text import shortened
from provision.commands import installation, planning
from provision.commands.run import Run, started, train
from provision.install import engine_builds, environments, installer, roles
from provision.install.bundle.archive import Bundle, unpack
from provision.install.rollout import Rollout
from provision.inventory import Inventory
from provision.launch.smoke import training_job
from provision.plan.options import SOURCES_FILE, Options, sources_of
from provision.plan.request import Request
from provision.remote.progress import Progress
from provision.report import entries
from provision.report.model import Report
from provision.survey import Facts, collect

Hosts = Mapping[str, Facts]
_MAX_ERRORS = 4  # of the survey that are shown before the plan; the report has all


def make_ready(
    inventory: Inventory,
    options: Options,
    progress: Progress,
    passwords: Mapping[str, str],
    downgrade: Callable[[list[str]], bool] = lambda _lines: False,
) -> Report:
    """Make every host of the inventory ready and verify it. Problems of single hosts are in the report; the run goes on with the others.

    ``downgrade`` agrees, or not, to replace installed packages by older ones that were requested.
    """
    options.catalog.check()
    if options.smoke:
        training_job.check_options(inventory, options.smoke, options.catalog)
    request = Request.of(inventory, options)
    if options.env is not None:
        environments.read(options.env)  # what cannot be read is an error before anything is done
    with started(inventory, "provision up --check" if options.check else "provision up", progress, passwords, options.catalog) as run:
        bundle = run.stage("bundle", _unpack, options.bundle)
        if bundle is not None:
            engine = engine_builds.with_bundled(request.engine, bundle.folder / "supplies")
            request = replace(request, lock=bundle.lock, options=bundle.complete(options), engine=engine)
        hosts = run.stage("survey", _survey, request, bundle)
        rollout = run.stage("plan", _plan, request, hosts, downgrade) if hosts else None
        if rollout and rollout.drivers:
            again = run.stage("driver", _install_drivers, rollout, bundle)
            if again is not rollout.facts:
                rollout = run.stage("plan", _plan, request, again, downgrade) if again else None
        if rollout:
            rollout = run.stage("plan", _show_plan, rollout, bundle)
        if rollout and rollout.plan.hosts:
            if not options.check:
                run.session.write(SOURCES_FILE, sources_of(inventory, options))
            run.stage("install", installation.install, rollout)
            if options.env is not None and not run.report.failures:
                run.stage("environment", installation.create_environment, rollout, options.env)
            if options.smoke and not options.check and not run.report.failures:
                smoke = bundle.complete_smoke(options.smoke) if bundle else options.smoke
                run.stage("training", train, rollout.plan, smoke)
    return run.report


def _unpack(run: Run, archive: Path | None) -> Bundle | None:
    return unpack(archive, run.session.folder / "bundle") if archive else None


def _survey(run: Run, request: Request, bundle: Bundle | None) -> Hosts:
    """The facts of the hosts that can be used; none where the run cannot start at ``--from``."""
    options = request.options
    known = engine_builds.known_for(request.engine, options.catalog, bundle.folder / "supplies" if bundle else None)
    survey = collect.survey_hosts(run.session, known, tries_networks=True)
    entries.add_survey(run.report, survey)
    usable = {name: facts for name, facts in survey.hosts.items() if name not in survey.blocked}
    if usable and survey.blocked:  # before the plan, which is for fewer hosts than the user expects
        run.session.progress.line(f"left out: {shortened(survey.blocked)}", "red")
        for problem in [each for each in survey.problems if each.severity == "error" and each.host][:_MAX_ERRORS]:
            run.session.progress.line(f"  {problem.host}: {problem.what}")
    problems = roles.unprepared(options.first_step, usable)
    run.report.failures += problems
    return {} if problems else usable


def _plan(_run: Run, request: Request, hosts: Hosts, downgrade: Callable[[list[str]], bool]) -> Rollout:
    return planning.with_agreed_downgrade(planning.make_plan(request, hosts), downgrade)


def _install_drivers(run: Run, rollout: Rollout, bundle: Bundle | None) -> Hosts:
    """Install the plan's drivers and survey the hosts again; no facts where a driver failed, because everything else depends on it."""
    session, report = run.session, run.report
    if own_reboots := list(installer.own_reboots(rollout)):
        report.failures += own_reboots
        return {}
    if rollout.request.options.check:
        return rollout.facts
    session.write("plan-with-drivers.json", rollout.plan.as_dict())
    outcome = installer.install_drivers(session, rollout)
    if not entries.add_drivers(report, rollout, outcome):
        return {}
    again = run.stage("survey", _survey, replace(rollout.request, options=replace(rollout.request.options, first_step=None)), bundle)
    # What the first survey found and still holds is said once.
    report.notes, report.failures = list(dict.fromkeys(report.notes)), list(dict.fromkeys(report.failures))
    return again


def _show_plan(run: Run, rollout: Rollout, bundle: Bundle | None) -> Rollout:
    """Record the plan and what there is to say about it; the rollout with the bundle's files."""
    session, report, plan, options = run.session, run.report, rollout.plan, rollout.request.options
    session.write("plan.json", plan.as_dict())
    entries.add_plan(report, rollout, planning.hint(rollout) if plan.hosts else None)
    for line in planning.describe_upgrade(rollout) if options.upgrade else ():
        session.progress.line(line)
    if bundle is None:
        return rollout
    bundle.check(session, plan)
    return replace(rollout, sources=replace(rollout.sources, bundle=bundle, user_files=bundle.complete_files(rollout.sources.user_files)))
