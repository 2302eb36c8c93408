"""Certification of hosts: survey, measurements of hosts and pairs, the engine's allreduce on the good ones, and the certificate."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from datetime import datetime, timezone

from provision.base.errors import ProvisionError
from provision.base.problems import Problem
from provision.base.text import joined
from provision.doctor.certify import allreduce, decisions, fabric, measure
from provision.doctor.certify.decisions import State
from provision.doctor.certify.model import Certificate, Group, Target
from provision.plan.model import Network
from provision.remote.session import Session
from provision.resolve.network import network
from provision.resolve.remedies import Conflict
from provision.survey import Facts, amd, collect


def certify(session: Session) -> Certificate:
    """Measure the session's hosts and judge them. Changes nothing on them.

    Raises:
        Interrupted: after Ctrl-C, when everything has been ended.
    """
    begin, survey, hosts = time.monotonic(), collect.survey_hosts(session), session.inventory.hosts
    state, groups, notes = State(seed=secrets.randbelow(1 << 30), catalog=session.catalog), list[Group](), list[str]()
    for host in hosts:
        try:
            if (facts := survey.hosts.get(host.name)) is None:
                raise ProvisionError(next((each.what for each in survey.problems if each.host == host.name), "not surveyed"))
            state.hosts[host.name] = _target(facts, network(host.name, facts, host.interface, alone=len(hosts) == 1))
        except (ProvisionError, Conflict) as error:
            state.lost[host.name] = str(error)
    if state.hosts:
        measure.rounds(session, state)
    answered = {name: survey.hosts[name] for name in state.measured}
    found = [*decisions.findings(state), *fabric.unused(answered, state.hosts, session.catalog)]
    guilty = _guilty(found)
    try:
        plan = allreduce.plan(session, {name: each for name, each in answered.items() if name not in guilty})
    except ProvisionError as error:
        notes.append(f"no allreduce was measured: {next(iter(error.parts()))[0]}")
    else:
        groups, of_groups = allreduce.measure(session, plan)
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
        hosts=tuple(host.name for host in hosts),
        quarantined=_guilty(found),
        found=tuple(found),
        notes=tuple(notes),
        targets=state.hosts,
        measured={name: each[-1] for name, each in state.measured.items()},
        pairs=tuple(state.pairs),
        groups=tuple(groups),
    )


def _target(facts: Facts, used: Network) -> Target:
    """Raises ProvisionError where the host's address is unknown."""
    if not used.address:
        raise ProvisionError("nothing is known of its network")
    plan, interface = facts.installed.plan, next((each for each in facts.network.interfaces if each.name == used.interface), None)
    mtu, mbps = (interface.mtu or 0, interface.speed or 0) if interface else (0, 0)
    return Target(
        address=used.address,
        interface=used.interface,
        mtu=mtu if 0 < mtu < 1 << 16 else 0,
        mbps=mbps if interface and interface.device and 0 < mbps < 1e9 else 0,
        python=f"{plan.prefix}/venv/bin/python" if plan and plan.torch and facts.gpus else facts.python.executable or "python3",
        torch=bool(plan and plan.torch and facts.gpus),
    )


def _guilty(found: Iterable[Problem]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(each.host for each in found if each.host))
