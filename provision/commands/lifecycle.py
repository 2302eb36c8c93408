"""The commands that change hosts, from survey to report. Each step is implemented in a folder of its own; this is their order."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from provision import catalog
from provision.base import paths, run_folders, signals
from provision.base.errors import Interrupted, ProvisionError, as_provision_error
from provision.base.problems import Problem
from provision.base.text import about, joined
from provision.commands import planning
from provision.install import drift, engine_builds, environments, installer, removal
from provision.install.bundle.archive import Bundle, unpack
from provision.install.bundle.gather import gather
from provision.install.installer import PackageSources
from provision.install.removal import HostRemoval
from provision.inventory import Inventory, last_run
from provision.launch.smoke import training_job
from provision.plan import lock, lock_file, summary
from provision.plan.model import Plan, without_credentials
from provision.plan.options import Options, SmokeOptions
from provision.plan.request import Request
from provision.remote import host_locks
from provision.remote.ansible import HostResult
from provision.remote.forecast import forecast
from provision.remote.progress import Progress
from provision.remote.session import Session
from provision.report import entries, page
from provision.report.model import Environment, Report
from provision.survey import Facts, collect, installed
from provision.survey.collect import Survey

_SOURCES = "sources.json"  # in a run's folder
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # the survey reads the same: a container on this machine has the same, a clone another


def up(
    inventory: Inventory,
    options: Options,
    progress: Progress,
    passwords: Mapping[str, str],
    downgrade: Callable[[list[str]], bool] = lambda _lines: False,
) -> Report:
    """Make every host of the inventory ready and verify it. Problems of single hosts are in the report; the run goes on with the others.

    ``downgrade`` agrees, or not, to replace installed packages by older ones that were requested.
    """
    catalog.check()
    if options.smoke:
        training_job.check_options(inventory, options.smoke)
    request = Request.of(inventory, options)
    if options.env is not None:
        environments.read(options.env)  # what cannot be read is an error before anything is done
    with _reported_run(inventory, "provision up --check" if options.check else "provision up", progress, passwords) as (session, report):
        session.step = "bundle"
        given = {
            **{name: str(path.absolute()) for name in ("wheels", "bundle") if (path := getattr(options, name))},
            **{name: without_credentials(url) for name in ("index_url", "apt_mirror") if (url := getattr(options, name))},
        }
        bundle = unpack(options.bundle, session.folder / "bundle") if options.bundle else None
        if bundle is not None:
            options = bundle.complete(options)
            request = replace(request, lock=bundle.lock, options=options)
        known = engine_builds.known_for(options.wheels, bundle.folder / "supplies" if bundle else None)
        facts = _survey(session, report, options.first_step, known)
        if not facts:
            return report
        session.step = "plan"
        plan, sources = planning.make_plan(request, facts)
        agreed = planning.agreed_downgrade(plan, request, facts, downgrade)
        if agreed is not request:
            request = agreed
            plan, sources = planning.make_plan(request, facts)
        if own_reboots := list(_own_reboots(inventory, installer.new_drivers(plan), facts)):
            report.failures += own_reboots
            return report
        if installer.new_drivers(plan) and not options.check:
            session.step = "driver"
            facts = _install_drivers(session, report, plan, facts, sources, known)
            if not facts:
                return report
            session.step = "plan"
            plan, sources = planning.make_plan(request, facts)
        _add_plan(session, report, plan, facts, request)
        if bundle is not None:
            sources = _from_bundle(session, bundle, plan, sources)
        if not plan.hosts:
            return report
        session.step = "install"
        if not options.check:
            session.write(_SOURCES, {"inventory": last_run.identity(inventory), **given})
        _install(session, report, plan, facts, sources, options)
        if options.env is not None and not report.failures:
            session.step = "environment"
            report.notes.append(_environment(session, report, plan, options.env, options))
        if options.smoke and not options.check and not report.failures:
            session.step = "training"
            _train(session, report, plan, bundle.complete_smoke(options.smoke) if bundle else options.smoke)
    return report


def with_earlier_sources(inventory: Inventory, options: Options) -> Options:
    """The options with the package index, apt mirror, wheels and bundle of the newest installation from here; logins are not recorded.

    Raises ProvisionError where its wheels or its bundle are gone.
    """
    for folder in run_folders.newest_first():
        with suppress(ValueError):
            given = json.loads(run_folders.content(folder / _SOURCES) or b"{}")
            if given.pop("inventory", None) == last_run.identity(inventory):
                files = {name: Path(given[name]) for name in ("wheels", "bundle") if name in given}
                if gone := [path for path in files.values() if not path.exists()]:
                    hint = f"provision up {inventory.argument}, with where packages come from now"
                    raise ProvisionError("the installation came from there, and it is gone", where=str(gone[0]), hint=hint)
                return replace(options, **given | files)
    return options


def _environment(session: Session, report: Report, plan: Plan, file: Path, options: Options) -> str:
    """Create the project's environment, or look what that would do; a sentence about it."""
    if options.check:
        installed = all(line.state == "unchanged" for line in report.hosts)
        return environments.preview(session, plan, file, options.index_url, installed=installed)
    python = environments.ensure(session, plan, file, options.index_url, locks=False)
    return f"the environment of {file} is {python.removesuffix('/bin/python')} on every host"


@contextmanager
def _reported_run(inventory: Inventory, purpose: str, progress: Progress, passwords: Mapping[str, str]) -> Iterator[tuple[Session, Report]]:
    """A run that locks the hosts and always writes a report with a line for every host."""
    began = time.monotonic()
    with (
        signals.termination_as_interrupt(),
        host_locks.acquired(inventory, purpose),
        Session(inventory, progress, passwords, locks_hosts=True, command=purpose) as session,
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
            yield session, report
        except BaseException as error:
            session.record_error(error)
            entries.add_missing_hosts(report, inventory, "not finished")
            report.failures.append(entries.error_failure(as_provision_error(error), inventory, session.step))
            progress.line(f"ended early; everything about this run: {session.folder}")
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


def _survey(session: Session, report: Report, first_step: str | None, is_engine_known: Callable[[Facts], bool]) -> Mapping[str, Facts]:
    """The facts of the hosts that can be used; none where the run cannot start at ``--from``."""
    session.step = "survey"
    survey = collect.survey_hosts(session, is_engine_known)
    entries.add_survey(report, survey)
    usable = {name: facts for name, facts in survey.hosts.items() if name not in survey.blocked}
    if first_step is None or "python" in installer.steps(first_step):
        return usable
    what = f"--from {first_step}: earlier steps have not run here: the prefix has no working environment; nothing was changed"
    without = [name for name, facts in usable.items() if not facts.installed.venv.works]
    report.failures += [Problem("error", what, "leave --from out", host=name, where="survey") for name in without]
    return {} if without else usable


def _own_reboots(inventory: Inventory, names: list[str], facts: Mapping[str, Facts]) -> Iterator[Problem]:
    """Hosts whose reboot would end this run, because it runs on them: by a local connection, or by ssh to the machine itself."""
    boot = BOOT_ID.read_text(encoding="ascii").strip() if BOOT_ID.exists() else None
    local = {host.name for host in inventory.hosts if host.connection == "local"}
    for name in names:
        if name in local or (boot and facts[name].boot_id == boot):
            what = "a new driver needs a reboot, and this run is on that machine; nothing was changed"
            yield Problem("error", what, "run provision from another machine, or leave --driver out", host=name, where="driver")


def _install_drivers(
    session: Session,
    report: Report,
    plan: Plan,
    facts: Mapping[str, Facts],
    sources: PackageSources,
    is_engine_known: Callable[[Facts], bool],
) -> Mapping[str, Facts]:
    """Install the plan's drivers and survey the hosts again; no facts where a driver failed, because everything else depends on it."""
    session.write("plan-with-drivers.json", plan.as_dict())
    outcome = installer.install_drivers(session, plan, facts, sources)
    before = len(report.failures)  # of other hosts, which could not be surveyed
    entries.add_driver_failures(report, session.inventory, outcome)
    if len(report.failures) > before:
        return {}
    names = installer.new_drivers(plan)
    report.notes.append(f"{joined(names)}: NVIDIA's driver was installed and the host rebooted; nvidia-smi answers")
    again = _survey(session, report, None, is_engine_known)
    # What the first survey found and still holds is said once.
    report.notes, report.failures = list(dict.fromkeys(report.notes)), list(dict.fromkeys(report.failures))
    return again


def _add_plan(session: Session, report: Report, plan: Plan, facts: Mapping[str, Facts], request: Request) -> None:
    session.write("plan.json", plan.as_dict())
    report.notes += plan.notes
    if plan.hosts and (hint := planning.hint(request, facts)) is not None:
        report.notes.append(f"hint: {hint}; see provision plan")
    others = [name for name, host in plan.hosts.items() if host.family != "debian"]
    if request.options.apt_mirror and others:
        report.notes.append(f"{joined(others)}: --apt-mirror is for Debian and Ubuntu; packages come from the configured sources")
    entries.add_conflicts(report, plan)
    if request.options.upgrade:
        for line in planning.describe_upgrade(request, facts, plan):
            session.progress.line(line)


def _from_bundle(session: Session, bundle: Bundle, plan: Plan, sources: PackageSources) -> PackageSources:
    """The sources of an installation from a bundle; raises UsageError where it lacks what the plan needs."""
    bundle.check(session, plan)
    return replace(sources, bundle=bundle, user_files=bundle.complete_files(sources.user_files))


def _install(session: Session, report: Report, plan: Plan, facts: Mapping[str, Facts], sources: PackageSources, options: Options) -> None:
    """Install the plan unless the survey shows that every host holds it, and record what the hosts hold in provision.lock."""
    manifests = installer.manifests(plan, session.inventory, facts)
    reasons = drift.reasons_to_run(plan, manifests, facts)
    holding: dict[str, lock.Files] = {}  # hosts that hold the plan, with their installed files; complete also after an interrupt
    try:
        if not reasons and not options.full and not options.first_step:
            nothing = dict.fromkeys(plan.hosts, "up to date; nothing to do (--full runs all steps)")
            _announce(session, plan, facts, nothing, options)
            report.hosts += [entries.host_line(host, HostResult()) for host in plan.hosts.values()]
            holding.update({name: facts[name].installed.files for name in plan.hosts})
            return
        _announce(session, plan, facts, reasons or dict.fromkeys(plan.hosts, "up to date; all steps will run"), options, install=True)
        done = installer.install(session, plan, facts, sources, holding.__setitem__, check=options.check, first=options.first_step)
        entries.add_installation(report, session.inventory, plan, done)
        if options.check:
            entries.add_dry_run(report, plan, done.outcome, facts, manifests, partial=options.first_step is not None)
    finally:
        if not options.check and not options.first_step:
            _record(session.inventory, plan, holding, report)
    if options.first_step and not options.check:
        report.notes.append(
            f"--from {options.first_step}: earlier steps were left out, so neither these hosts nor {lock.NAME} record that they hold the "
            "plan; a run without --from checks all steps and records it"
        )


def _announce(
    session: Session, plan: Plan, facts: Mapping[str, Facts], reasons: Mapping[str, str], options: Options, *, install: bool = False
) -> None:
    """Show the plan and how long the run will take, as far as earlier runs tell."""
    lines = list(summary.brief(plan, reasons))
    if not options.check and not options.first_step:
        ahead = {"install": install, "environment": options.env is not None, "training": options.smoke is not None}
        stages = {step.stage for step in session.timeline.steps} | {stage for stage, comes in ahead.items() if comes}
        session.timeline.installs_on(plan.hosts, [name for name in plan.hosts if facts[name].installed.manifest is None])
        found = forecast(paths.runs(), plan.hosts, stages, session.timeline.new_hosts, session.folder)
        session.forecast = found
        took = "not known: no earlier run did the same on these hosts"
        if found is not None:
            took = f"{about(found.seconds)} in all, as {'the run before' if found.runs == 1 else f'{found.runs} runs before'} took"
        lines.append(("time", took))
    more = ("more", f"provision plan {shlex.quote(session.inventory.argument)}: the reasons for each version")
    count = len(plan.hosts)
    session.progress.plan(f"Plan for {count} host{'s' * (count != 1)}", lines, more)


def _record(inventory: Inventory, plan: Plan, holding: Mapping[str, lock.Files], report: Report) -> None:
    if not holding:
        return
    try:
        with signals.deferred():
            lock_file.record(inventory, plan, holding)
    except (OSError, ValueError, ProvisionError) as error:  # a host may report anything about its files
        report.notes.append(f"{lock.NAME} could not be written: {error}")


def smoke(inventory: Inventory, options: SmokeOptions, progress: Progress, passwords: Mapping[str, str]) -> Report:
    """Run the training job alone, with what earlier runs installed according to the hosts' manifests."""
    training_job.check_options(inventory, options)
    with _reported_run(inventory, "provision smoke", progress, passwords) as (session, report):
        survey = collect.survey_hosts(session)
        entries.add_survey(report, survey)
        for name in (name for name, found in survey.hosts.items() if not found.installed.manifest):
            report.failures.append(
                Problem("error", "nothing is installed here yet", f"provision up {inventory.argument}", host=name, where="smoke")
            )
        if not report.failures:
            plan = installed.plan(inventory, survey.hosts)
            report.hosts = [entries.host_line(host, HostResult()) for host in plan.hosts.values()]
            session.step = "training"
            _train(session, report, plan, options)
    return report


def _train(session: Session, report: Report, plan: Plan, options: SmokeOptions) -> None:
    try:
        result = training_job.run(session, plan, options)
    except Interrupted:
        raise
    except ProvisionError as error:  # the installation is complete, and its table is still to be shown
        report.failures.append(entries.error_failure(error, session.inventory, "training"))
        return
    report.np = sum(session.record.ranks.values()) or None
    report.smoke = result.report
    report.smoke_summary = result.summary
    report.smoke_faults = list(result.faults)
    if not result.faults:
        for host in report.hosts:
            host.state = "ready"


def bundle(inventory: Inventory, options: Options, target: Path, progress: Progress, passwords: Mapping[str, str]) -> Survey:
    """Write everything that the plan needs to ``target``; raises ProvisionError where something is unavailable. Returns the survey."""
    with host_locks.acquired(inventory, "provision bundle"), Session(inventory, progress, passwords, command="provision bundle") as session:
        survey = collect.survey_hosts(session, engine_builds.known_for(options.wheels))
        if survey.blocked:
            session.record.exit_code = 1
            return survey
        request = Request.of(inventory, options)
        plan, sources = planning.make_plan(replace(request, options=replace(options, python_downloads=False)), survey.hosts)
        planning.refuse_conflicts(plan)
        gather(session, plan, survey.hosts, options, sources, target, request.lock)
        return survey


def remove(
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
