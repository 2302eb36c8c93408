"""The installation of a run, as stages: what will be done is announced, done, and recorded in provision.lock."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from provision.base import paths, signals
from provision.base.errors import ProvisionError
from provision.base.problems import Problem
from provision.commands.run import Run
from provision.install import drift, environments, installer
from provision.install.rollout import Rollout
from provision.plan import lock, lock_file, summary
from provision.report import entries


def install(run: Run, rollout: Rollout) -> None:
    """Install the plan unless the survey shows that every host holds it, and record what the hosts hold in provision.lock."""
    session, report, plan, options = run.session, run.report, rollout.plan, rollout.request.options
    reasons = drift.reasons_to_run(rollout)
    holding: dict[str, lock.Files] = {}  # hosts that hold the plan, with their installed files; complete also after an interrupt
    try:
        if not reasons and not options.full and not options.first_step:
            nothing = Problem("note", "up to date; nothing to do (--full runs all steps)", id="up-to-date")
            _announce(run, rollout, dict.fromkeys(plan.hosts, nothing))
            entries.add_complete(report, plan)
            holding.update({name: rollout.facts[name].installed.files for name in plan.hosts})
            return
        wanted = Problem("note", "up to date; all steps will run", id="requested")
        _announce(run, rollout, reasons or dict.fromkeys(plan.hosts, wanted))
        done = installer.install(session, rollout, holding.__setitem__, check=options.check)
        entries.add_installation(report, rollout, done)
        if options.check:
            entries.add_dry_run(report, rollout, done.outcome)
    finally:
        if holding and not options.check and not options.first_step:
            try:
                with signals.deferred():
                    lock_file.record(session.inventory, plan, holding)
            except (OSError, ValueError, ProvisionError) as error:  # a host may report anything about its files
                report.notes.append(f"{lock.NAME} could not be written: {error}")
    if options.first_step and not options.check:
        report.notes.append(
            f"--from {options.first_step}: earlier steps were left out, so neither these hosts nor {lock.NAME} record that they hold the "
            "plan; a run without --from checks all steps and records it"
        )


def _announce(run: Run, rollout: Rollout, reasons: Mapping[str, Problem]) -> None:
    """Show the plan, and why the installation runs."""
    more = ("reasons", paths.short(f"provision plan {shlex.quote(run.session.inventory.argument)} --why"))
    run.session.progress.plan(summary.title(rollout.plan), list(summary.brief(rollout.plan, reasons)), more)


def create_environment(run: Run, rollout: Rollout, file: Path) -> None:
    """Create the project's environment, or find out what that would do, and note it."""
    session, report, options = run.session, run.report, rollout.request.options
    if options.check:
        installed = all(line.state == "unchanged" for line in report.hosts)
        report.notes.append(environments.preview(session, rollout.plan, file, options.index_url, installed=installed))
        return
    python = environments.ensure(session, rollout.plan, file, options.index_url, locks=False)
    report.notes.append(f"the environment of {file} is {python.removesuffix('/bin/python')} on every host")
