"""Certification of hosts: survey, measurements of hosts and pairs, the engine's allreduce on the good ones, and the certificate."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from datetime import datetime, timezone

from provision.base.errors import ProvisionError
from provision.base.text import joined
from provision.doctor.certify import allreduce, decisions, fabric, measure
from provision.doctor.certify.decisions import State
from provision.doctor.certify.measure import Target
from provision.doctor.certify.model import Certificate, Found, Group
from provision.plan.model import Network
from provision.remote.session import Session
from provision.resolve.network import network
from provision.resolve.remedies import Conflict
from provision.survey import Facts, amd, collect, installed


def certify(session: Session) -> Certificate:
    """Measure the session's hosts and judge them. Changes nothing on them.

    Raises:
        Interrupted: after Ctrl-C, when everything has been ended.
    """
    begin, names = time.monotonic(), [host.name for host in session.inventory.hosts]
    survey = collect.survey_hosts(session)
    state, networks, targets = State(names, secrets.randbelow(1 << 30), session.catalog), dict[str, Network](), dict[str, Target]()
    for host in session.inventory.hosts:
        facts = survey.hosts.get(host.name)
        try:
            if facts is None:
                raise ProvisionError(next((each.what for each in survey.problems if each.host == host.name), "not surveyed"))
            networks[host.name] = network(host.name, facts, host.interface, alone=len(names) == 1)
            if not networks[host.name].address:
                raise ProvisionError("nothing is known of its network")
            targets[host.name] = _target(facts, networks[host.name].address)
        except (ProvisionError, Conflict) as error:
            state.lost[host.name] = str(error)
    if targets:
        measure.rounds(session, targets, state)
    answered = {name: survey.hosts[name] for name in state.able}
    found = [
        *decisions.findings(state),
        *fabric.unused(answered, {name: each.interface for name, each in networks.items()}, session.catalog),
    ]
    groups, of_groups, notes = _allreduce(session, answered, _guilty(found))
    found += of_groups
    if bare := [name for name, facts in answered.items() if facts.gpus and not state.measured[name][-1].devices]:
        notes.append(f"GPUs were not measured, because PyTorch for them is not installed: {joined(bare)}")
    if others := [name for name, facts in answered.items() if amd.has_gpu(facts, session.catalog)]:
        notes.append(f"GPUs were not measured, because they are AMD's: {joined(others)}")
    return Certificate(
        when=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        ok=not found,
        seconds=round(time.monotonic() - begin, 1),
        rounds=state.rounds,
        hosts=tuple(names),
        quarantined=_guilty(found),
        found=tuple(found),
        notes=tuple(notes),
        measured={name: state.measured[name][-1] for name in state.able},
        pairs=tuple(state.pairs),
        groups=tuple(groups),
    )


def _target(facts: Facts, address: str) -> Target:
    plan = facts.installed.plan
    if plan is not None and plan.torch and facts.gpus:
        return Target(address, f"{plan.prefix}/venv/bin/python", torch=True)
    return Target(address, facts.python.executable or "python3")


def _guilty(found: list[Found]) -> tuple[str, ...]:
    """The hosts to leave out; of a link between two others, the second one."""
    hosts = dict.fromkeys(each.host for each in found if each.host)
    for each in found:
        if each.link and not set(each.link) & set(hosts):
            hosts[each.link[1]] = None
    return tuple(hosts)


def _allreduce(session: Session, facts: Mapping[str, Facts], guilty: tuple[str, ...]) -> tuple[list[Group], list[Found], list[str]]:
    """The engine's allreduce on hosts that are not guilty; what it shows; and why it was not measured, where it was not."""
    good = {name: each for name, each in facts.items() if name not in guilty}
    if bare := [name for name, each in good.items() if not each.installed.was_completed]:
        return [], [], [f"no allreduce was measured, because the engine is not installed on {joined(bare)}: provision up"]
    if len(good) < 2:
        return [], [], ["no allreduce was measured: fewer than two hosts are left"]
    try:
        plan = installed.plan(session.inventory, good)
    except ProvisionError as error:
        return [], [], [f"no allreduce was measured: {error.where}: {error.what}"]
    return *allreduce.measure(session, plan), []
