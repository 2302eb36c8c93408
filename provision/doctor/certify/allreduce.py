"""Allreduces of growing groups of hosts by the installed engine: one job, in which all groups of a size work at the same time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from provision.base import resources
from provision.base.validation import Answer
from provision.doctor.certify import decisions
from provision.doctor.certify.model import Found, Group
from provision.hostside import certify_allreduce
from provision.launch import jobs, launchers
from provision.plan.model import Plan
from provision.remote.session import Session

_START_S = 60.0
_OF_A_HOST = ("silent", "lost", "unreachable", "refused", "orphaned")  # what ends a job by the fault of one host

_Rank = Annotated[int, Field(ge=0, lt=100_000)]


class _Group(Answer):
    ranks: Annotated[tuple[_Rank, ...], Field(min_length=2, max_length=100_000)]
    us: Annotated[float, Field(gt=0, lt=1e13)]
    wrong: Annotated[int, Field(ge=0, lt=1 << 40)]


class _Report(Answer):
    groups: Annotated[tuple[_Group, ...], Field(min_length=1, max_length=1_000_000)]


def measure(session: Session, plan: Plan) -> tuple[list[Group], list[Found]]:
    """The groups, and what they show. What is slow is measured once more, and the better time counts."""
    names = list(plan.hosts)
    groups, found = _run(session, plan, names, 1)
    if any(each.id == "slow-allreduce" for each in decisions.of_groups(groups)):
        again, found = _run(session, plan, names, 2)
        later = {each.hosts: each for each in again}
        both = [(each, later.get(each.hosts, each)) for each in groups]
        groups = [one.model_copy(update={"us": min(one.us, two.us), "wrong": max(one.wrong, two.wrong)}) for one, two in both]
    return groups, [*found, *decisions.of_groups(groups)]


def _run(session: Session, plan: Plan, names: Sequence[str], number: int) -> tuple[list[Group], list[Found]]:
    where = launchers.Environment.of(plan)
    command = ("python", "-c", resources.script("certify_allreduce.py"), "{job}/report.json")
    options = launchers.RunOptions(command, environment={launchers.THREADS: "1"}, report="report.json", start_timeout=_START_S)
    placed = [(plan.hosts[name].network.address, 1) for name in names]
    job = launchers.own_job(where, placed, options)
    log = session.folder / f"certify-{number}.log"
    result = jobs.run(session, job, f"Allreduce of growing groups of {len(names)} hosts", log, lambda _line: None)
    if result.interrupted:
        session.abort()
    try:
        if result.code == 0:
            return _groups(result.report, names), []
        what = jobs.no_report(result, job, log)
    except ValueError:
        what = "the job's report is invalid"
    verdict = result.verdict
    host = jobs.name_of(verdict.host, job) if verdict is not None and verdict.kind in _OF_A_HOST else None
    return [], [Found(id="allreduce-failed", host=host if host in names else None, what=what, hint=f"read {log}")]


def _groups(document: object, names: Sequence[str]) -> list[Group]:
    """What rank 0 reports: of each group that the script makes of so many hosts, and of no other.

    Raises:
        ValueError: it reports something else.
    """
    report = _Report.model_validate_json(json.dumps(document))
    known = [tuple(group) for level in certify_allreduce.levels(len(names)) for group in level]
    if sorted(each.ranks for each in report.groups) != sorted(known):
        raise ValueError("other groups")
    return [Group(hosts=tuple(names[rank] for rank in each.ranks), us=each.us, wrong=each.wrong) for each in report.groups]
