"""Allreduces of growing groups of hosts by the installed engine: one job, in which all groups of a size work at the same time."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import Field

from provision.base import resources
from provision.base.errors import ProvisionError
from provision.base.problems import Problem
from provision.base.text import joined
from provision.base.validation import Answer
from provision.doctor.certify import decisions
from provision.doctor.certify.model import Group
from provision.hostside import certify_allreduce
from provision.launch import jobs, launchers
from provision.plan.model import Plan
from provision.remote.session import Session
from provision.survey import Facts, installed

_START_S = 60.0
_OF_A_HOST = ("silent", "lost", "unreachable", "refused", "orphaned")  # what ends a job by the fault of one host


class _Report(Answer):
    """Of each group, its best time in µs, and how many results were wrong."""

    groups: tuple[tuple[Annotated[float, Field(gt=0, lt=1e13)], Annotated[int, Field(ge=0, lt=1 << 40)]], ...]


def plan(session: Session, facts: Mapping[str, Facts]) -> Plan:
    """What is installed on these hosts. Raises ProvisionError where they cannot run a job together."""
    if bare := [name for name, each in facts.items() if not each.installed.was_completed]:
        raise ProvisionError(f"the engine is not installed on {joined(bare)}: provision up")
    if len(facts) < 2:
        raise ProvisionError("fewer than two hosts are left")
    return installed.plan(session.inventory, facts)


def measure(session: Session, plan: Plan) -> tuple[list[Group], list[Problem]]:
    """The groups of these hosts, and what is wrong with them."""
    names, log = list(plan.hosts), session.folder / "certify.log"
    command = ("python", "-c", resources.script("certify_allreduce.py"), "{job}/report.json")
    options = launchers.RunOptions(command, environment={launchers.THREADS: "1"}, report="report.json", start_timeout=_START_S)
    job = launchers.own_job(launchers.Environment.of(plan), [(plan.hosts[name].network.address, 1) for name in names], options)
    result = jobs.run(session, job, f"Allreduce of growing groups of {len(names)} hosts", log, lambda _line: None)
    if result.interrupted:
        session.abort()
    try:
        if result.code == 0:
            groups = _groups(result.report, names)
            return groups, decisions.of_groups(groups)
        what = jobs.no_report(result, job, log)
    except ValueError:
        what = "the job's report is invalid"
    name = jobs.name_of(result.verdict.host, job) if result.verdict is not None and result.verdict.kind in _OF_A_HOST else None
    host = name if name in names else None
    return [], [Problem("error", what, f"read {log}", id="allreduce-failed", host=host, where=host or "cluster")]


def _groups(report: object, names: Sequence[str]) -> list[Group]:
    """What rank 0 reports of the groups that the script makes of so many hosts. Raises ValueError where it reports something else."""
    groups = [group for level in certify_allreduce.levels(len(names)) for group in level]
    figures = _Report.model_validate_json(json.dumps(report)).groups
    return [
        Group(hosts=tuple(names[rank] for rank in group), us=us, wrong=wrong) for group, (us, wrong) in zip(groups, figures, strict=True)
    ]
