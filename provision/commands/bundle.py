"""`provision bundle`: everything that the plan needs, in one file for hosts without a network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from provision.commands import planning
from provision.install import engine_builds
from provision.install.bundle.gather import gather
from provision.inventory import Inventory
from provision.plan.options import Options
from provision.plan.request import Request
from provision.remote import host_locks
from provision.remote.progress import Progress
from provision.remote.session import Session
from provision.survey import collect
from provision.survey.collect import Survey


def write_bundle(inventory: Inventory, options: Options, target: Path, progress: Progress, passwords: Mapping[str, str]) -> Survey:
    """Write everything that the plan needs to ``target``; raises ProvisionError where something is unavailable. Returns the survey."""
    with (
        host_locks.acquired(inventory, "provision bundle"),
        Session(inventory, progress, passwords, command="provision bundle", catalog=options.catalog) as session,
    ):
        request = Request.of(inventory, options)
        survey = collect.survey_hosts(session, engine_builds.known_for(request.engine, options.catalog))
        if survey.blocked:
            session.record.exit_code = 1
            return survey
        rollout = planning.make_plan(replace(request, options=replace(options, python_downloads=False)), survey.hosts)
        rollout.plan.refuse_conflicts()
        gather(session, rollout.plan, survey.hosts, options, rollout.sources, target, request.lock)
        return survey
