"""`provision smoke`: the training job alone, with what earlier runs installed."""

from __future__ import annotations

from collections.abc import Mapping

from provision.base.problems import Problem
from provision.catalog import overlay
from provision.commands.run import Run, started, train
from provision.inventory import Inventory
from provision.launch.smoke import training_job
from provision.plan.model import Plan
from provision.plan.options import SmokeOptions
from provision.remote.progress import Progress
from provision.report import entries
from provision.report.model import Report
from provision.survey import collect, installed


def verify(inventory: Inventory, options: SmokeOptions, progress: Progress, passwords: Mapping[str, str]) -> Report:
    """Run the training job with what the hosts' manifests say."""
    catalog = overlay.own()
    training_job.check_options(inventory, options, catalog)
    with started(inventory, "provision smoke", progress, passwords, catalog) as run:
        plan = run.stage("survey", _installed)
        if not run.report.failures:
            entries.add_complete(run.report, plan)
            run.stage("training", train, plan, options)
    return run.report


def _installed(run: Run) -> Plan:
    """What is installed on the hosts; empty where a host has nothing, or could not be surveyed."""
    inventory = run.session.inventory
    survey = collect.survey_hosts(run.session)
    entries.add_survey(run.report, survey)
    for name in (name for name, found in survey.hosts.items() if not found.installed.was_completed):
        what = "nothing is installed here yet"
        run.report.failures.append(
            Problem("error", what, f"provision up {inventory.argument}", host=name, where="smoke", id="not-installed")
        )
    return Plan() if run.report.failures else installed.plan(inventory, survey.hosts)
