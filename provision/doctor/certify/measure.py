"""Rounds of measurements on hosts: one command on each host per round, over ssh, with a bound on its time and on its answer."""

from __future__ import annotations

import json
import secrets
import shlex
from typing import TypeVar

from provision.base import resources
from provision.base.errors import ProvisionError
from provision.doctor.certify import decisions
from provision.doctor.certify.decisions import Round, State
from provision.doctor.certify.model import HostMeasured, Pair, PairMeasured
from provision.remote import ssh
from provision.remote.session import Session
from provision.survey.document import parse_answer

_BEGIN = "===PROVISION-CERTIFY-BEGIN==="  # as hostside/certify.py writes it
_PORTS = range(32768, 60999)  # as survey/reachability.py
_HOST_S, _PAIR_S = 70, 40  # of one answer: every core and GPU works for seconds, and PyTorch is imported; TCP is measured six times
_WAIT_S = 20  # the later side of a pair may begin that much later; more of them than ssh starts at once begin later still
_PER_HOST_S = 0.3  # hosts that share a machine, as in a sandbox, wait for each other
_TIMES_AGAIN = 3  # that a suspect is measured: the best counts, because a busy moment makes slow, and none fast
_WHY = 300  # letters of an error
_Measured = TypeVar("_Measured", HostMeasured, PairMeasured)


def rounds(session: Session, state: State) -> None:
    """Measure, round by round, until `decisions` asks for no more; what was found is in ``state``."""
    while (planned := decisions.next_round(state)) is not None:
        state.rounds += 1
        title = "Measure hosts" if state.rounds == 1 else "Measure pairs" if state.rounds <= state.planned else "Measure suspects again"
        session.progress.stage(f"{title} (round {state.rounds} of at most {state.planned + decisions.EXTRA_ROUNDS})")
        made = orders(state, planned)
        scripts = {name: resources.inline_command("certify.py", interpreter=shlex.quote(state.hosts[name].python)) for name in made}
        stdin = {name: json.dumps(order).encode() for name, order in made.items()}
        answers = ssh.run(session, scripts, stdin=stdin, timeout=_seconds(planned) + ssh.TIMEOUT_S / 2)
        for name in planned.hosts:
            measured = _read(HostMeasured, answers[name])
            if measured.error is None:
                state.measured.setdefault(name, []).append(measured)
            else:
                state.lost[name] = measured.error
        for caller, other in planned.pairs:
            state.pairs.append(Pair(round=state.rounds, caller=caller, answerer=other, measured=_read(PairMeasured, answers[caller])))


def _seconds(planned: Round) -> float:
    busy = min(sum(map(len, (planned.hosts, *planned.pairs))), ssh.PARALLEL)
    return _WAIT_S + _PER_HOST_S * busy + (_HOST_S if planned.hosts else _PAIR_S)


def orders(state: State, planned: Round) -> dict[str, dict[str, object]]:
    """Host → its order; who does not know the key of its pair and round is not answered."""
    seconds, times = _seconds(planned), 1 if state.rounds <= state.planned else _TIMES_AGAIN
    bounds = {"seconds": seconds, "wait": seconds - _PAIR_S, "times": times}
    made: dict[str, dict[str, object]] = {name: {"task": "host", "torch": state.hosts[name].torch, **bounds} for name in planned.hosts}
    for pair in planned.pairs:
        key, ports = secrets.token_hex(32), secrets.SystemRandom().sample(_PORTS, 3)
        same = {"task": "pair", "key": key, "ports": ports, "mtu": state.mtu(pair), **bounds}
        for me, other in (pair, pair[::-1]):
            peer = {"name": other, "address": state.hosts[other].address}
            made[me] = {**same, "call": me == pair[0], "me": me, "address": state.hosts[me].address, "peer": peer}
    return made


def _read(model: type[_Measured], answer: ssh.Answer) -> _Measured:
    """A host's answer, or why there is none."""
    try:
        return parse_answer(model, answer.out, _BEGIN, "the measurement")
    except ProvisionError as error:
        why = error.what if answer.code == 0 else f"the measurement did not end: {answer.error}"
    return model(error=why[:_WHY])
