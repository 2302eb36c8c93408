"""`provision up`: survey, plan, install, train. Each stage is implemented in a folder of its own; this is their order."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from provision import catalog
from provision.base import paths, run_folders, signals
from provision.base.errors import ProvisionError
from provision.base.problems import Problem
from provision.base.text import about, joined
from provision.commands import planning
from provision.commands.run import Run, started, train
from provision.install import drift, engine_builds, environments, installer, roles
from provision.install.bundle.archive import Bundle, unpack
from provision.install.installer import Rollout
from provision.inventory import Inventory, last_run
from provision.launch.smoke import training_job
from provision.plan import lock, lock_file, summary
from provision.plan.model import without_credentials
from provision.plan.options import Options
from provision.plan.request import Request
from provision.remote.ansible import HostResult
from provision.remote.forecast import forecast
from provision.remote.progress import Progress
from provision.report import entries
from provision.report.model import Report
from provision.survey import Facts, collect

_SOURCES = "sources.json"  # in a run's folder
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # the survey reads the same: a container on this machine has the same, a clone another

Hosts = Mapping[str, Facts]


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
    catalog.check()
    if options.smoke:
        training_job.check_options(inventory, options.smoke)
    request = Request.of(inventory, options)
    if options.env is not None:
        environments.read(options.env)  # what cannot be read is an error before anything is done
    with started(inventory, "provision up --check" if options.check else "provision up", progress, passwords) as run:
        bundle = run.stage("bundle", _unpack, options.bundle)
        if bundle is not None:
            request = replace(request, lock=bundle.lock, options=bundle.complete(options))
        hosts = run.stage("survey", _survey, request, bundle)
        rollout = run.stage("plan", _plan, request, hosts, downgrade) if hosts else None
        if rollout and rollout.drivers:
            hosts = run.stage("driver", _install_drivers, rollout, bundle)
            rollout = run.stage("plan", _plan, request, hosts, downgrade) if hosts else None
        if rollout:
            rollout = run.stage("plan", _show_plan, rollout, bundle)
        if rollout and rollout.plan.hosts:
            if not options.check:
                _record_sources(run, options)
            run.stage("install", _install, rollout)
            if options.env is not None and not run.report.failures:
                run.stage("environment", _environment, rollout, options.env)
            if options.smoke and not options.check and not run.report.failures:
                smoke = bundle.complete_smoke(options.smoke) if bundle else options.smoke
                run.stage("training", train, rollout.plan, smoke)
    return run.report


def _unpack(run: Run, archive: Path | None) -> Bundle | None:
    return unpack(archive, run.session.folder / "bundle") if archive else None


def _survey(run: Run, request: Request, bundle: Bundle | None) -> Hosts:
    """The facts of the hosts that can be used; none where the run cannot start at ``--from``."""
    options = request.options
    known = engine_builds.known_for(request.engine, options.wheels, bundle.folder / "supplies" if bundle else None)
    survey = collect.survey_hosts(run.session, known)
    entries.add_survey(run.report, survey)
    usable = {name: facts for name, facts in survey.hosts.items() if name not in survey.blocked}
    first = options.first_step
    if first is None or "python" in roles.steps(first):
        return usable
    what = f"--from {first}: earlier steps have not run here: the prefix has no working environment; nothing was changed"
    without = [name for name, facts in usable.items() if not facts.installed.venv.works]
    run.report.failures += [
        Problem("error", what, "leave --from out", host=name, where="survey", id="earlier-steps-missing") for name in without
    ]
    return {} if without else usable


def _plan(_run: Run, request: Request, hosts: Hosts, downgrade: Callable[[list[str]], bool]) -> Rollout:
    return planning.with_agreed_downgrade(planning.make_plan(request, hosts), downgrade)


def _own_reboots(rollout: Rollout) -> Iterator[Problem]:
    """Hosts whose reboot would end this run, because it runs on them: by a local connection, or by ssh to the machine itself."""
    boot = BOOT_ID.read_text(encoding="ascii").strip() if BOOT_ID.exists() else None
    local = {host.name for host in rollout.inventory.hosts if host.connection == "local"}
    for name in rollout.drivers:
        if name in local or (boot and rollout.facts[name].boot_id == boot):
            what = "a new driver needs a reboot, and this run is on that machine; nothing was changed"
            yield Problem(
                "error", what, "run provision from another machine, or leave --driver out", host=name, where="driver", id="own-reboot"
            )


def _install_drivers(run: Run, rollout: Rollout, bundle: Bundle | None) -> Hosts:
    """Install the plan's drivers and survey the hosts again; no facts where a driver failed, because everything else depends on it."""
    session, report = run.session, run.report
    if own_reboots := list(_own_reboots(rollout)):
        report.failures += own_reboots
        return {}
    if rollout.request.options.check:
        return rollout.facts
    session.write("plan-with-drivers.json", rollout.plan.as_dict())
    outcome = installer.install_drivers(session, rollout)
    before = len(report.failures)  # of other hosts, which could not be surveyed
    entries.add_driver_failures(report, session.inventory, outcome)
    if len(report.failures) > before:
        return {}
    report.notes.append(f"{joined(rollout.drivers)}: NVIDIA's driver was installed and the host rebooted; nvidia-smi answers")
    again = run.stage("survey", _survey, replace(rollout.request, options=replace(rollout.request.options, first_step=None)), bundle)
    # What the first survey found and still holds is said once.
    report.notes, report.failures = list(dict.fromkeys(report.notes)), list(dict.fromkeys(report.failures))
    return again


def _show_plan(run: Run, rollout: Rollout, bundle: Bundle | None) -> Rollout:
    """Record the plan and what there is to say about it; the rollout with the bundle's files."""
    session, report, plan, options = run.session, run.report, rollout.plan, rollout.request.options
    session.write("plan.json", plan.as_dict())
    report.notes += plan.notes
    if plan.hosts and (hint := planning.hint(rollout)) is not None:
        report.notes.append(f"hint: {hint}; see provision plan")
    others = [name for name, host in plan.hosts.items() if host.family != "debian"]
    if options.apt_mirror and others:
        report.notes.append(f"{joined(others)}: --apt-mirror is for Debian and Ubuntu; packages come from the configured sources")
    entries.add_conflicts(report, plan)
    for line in planning.describe_upgrade(rollout) if options.upgrade else ():
        session.progress.line(line)
    if bundle is None:
        return rollout
    bundle.check(session, plan)
    return replace(rollout, sources=replace(rollout.sources, bundle=bundle, user_files=bundle.complete_files(rollout.sources.user_files)))


def _install(run: Run, rollout: Rollout) -> None:
    """Install the plan unless the survey shows that every host holds it, and record what the hosts hold in provision.lock."""
    session, report, plan, options = run.session, run.report, rollout.plan, rollout.request.options
    reasons = drift.reasons_to_run(rollout)
    holding: dict[str, lock.Files] = {}  # hosts that hold the plan, with their installed files; complete also after an interrupt
    try:
        if not reasons and not options.full and not options.first_step:
            nothing = Problem("note", "up to date; nothing to do (--full runs all steps)", id="up-to-date")
            _announce(run, rollout, dict.fromkeys(plan.hosts, nothing))
            report.hosts += [entries.host_line(host, HostResult()) for host in plan.hosts.values()]
            holding.update({name: rollout.facts[name].installed.files for name in plan.hosts})
            return
        wanted = Problem("note", "up to date; all steps will run", id="requested")
        _announce(run, rollout, reasons or dict.fromkeys(plan.hosts, wanted), install=True)
        done = installer.install(session, rollout, holding.__setitem__, check=options.check)
        entries.add_installation(report, session.inventory, plan, done)
        if options.check:
            entries.add_dry_run(report, rollout, done.outcome)
    finally:
        if not options.check and not options.first_step:
            _record(session.inventory, rollout, holding, report)
    if options.first_step and not options.check:
        report.notes.append(
            f"--from {options.first_step}: earlier steps were left out, so neither these hosts nor {lock.NAME} record that they hold the "
            "plan; a run without --from checks all steps and records it"
        )


def _announce(run: Run, rollout: Rollout, reasons: Mapping[str, Problem], *, install: bool = False) -> None:
    """Show the plan and how long the run will take, as far as earlier runs tell."""
    session, options, hosts = run.session, rollout.request.options, rollout.plan.hosts
    lines = list(summary.brief(rollout.plan, reasons))
    if not options.check and not options.first_step:
        ahead = {"install": install, "environment": options.env is not None, "training": options.smoke is not None}
        stages = {step.stage for step in session.timeline.steps} | {stage for stage, comes in ahead.items() if comes}
        session.timeline.installs_on(hosts, [name for name in hosts if not rollout.facts[name].installed.was_completed])
        found = forecast(paths.runs(), hosts, stages, session.timeline.new_hosts, session.folder)
        session.forecast = found
        took = "not known: no earlier run did the same on these hosts"
        if found is not None:
            took = f"{about(found.seconds)} in all, as {'the run before' if found.runs == 1 else f'{found.runs} runs before'} took"
        lines.append(("time", took))
    more = ("more", f"provision plan {shlex.quote(session.inventory.argument)} --why: the reasons for each version")
    session.progress.plan(summary.title(rollout.plan), lines, more)


def _record(inventory: Inventory, rollout: Rollout, holding: Mapping[str, lock.Files], report: Report) -> None:
    if not holding:
        return
    try:
        with signals.deferred():
            lock_file.record(inventory, rollout.plan, holding)
    except (OSError, ValueError, ProvisionError) as error:  # a host may report anything about its files
        report.notes.append(f"{lock.NAME} could not be written: {error}")


def _environment(run: Run, rollout: Rollout, file: Path) -> None:
    """Create the project's environment, or find out what that would do, and note it."""
    session, report, options = run.session, run.report, rollout.request.options
    if options.check:
        installed = all(line.state == "unchanged" for line in report.hosts)
        report.notes.append(environments.preview(session, rollout.plan, file, options.index_url, installed=installed))
        return
    python = environments.ensure(session, rollout.plan, file, options.index_url, locks=False)
    report.notes.append(f"the environment of {file} is {python.removesuffix('/bin/python')} on every host")


def _record_sources(run: Run, options: Options) -> None:
    """Note where packages come from, for `with_earlier_sources`; logins are not recorded."""
    given = {
        **{name: str(path.absolute()) for name in ("wheels", "bundle") if (path := getattr(options, name))},
        **{name: without_credentials(url) for name in ("index_url", "apt_mirror") if (url := getattr(options, name))},
    }
    run.session.write(_SOURCES, {"inventory": last_run.identity(run.session.inventory), **given})


def with_earlier_sources(inventory: Inventory, options: Options) -> Options:
    """The options with the package index, apt mirror, wheels and bundle of the newest installation from here.

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
