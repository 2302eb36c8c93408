"""Rounds of measurements on hosts: one command on each host per round, over ssh, with a bound on its time and on its answer."""

from __future__ import annotations

import json
import secrets
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from pydantic import ValidationError

from provision.base import resources
from provision.base.errors import ProvisionError
from provision.base.validation import Answer
from provision.doctor.certify import decisions
from provision.doctor.certify.decisions import Round, State
from provision.doctor.certify.model import HostMeasured, Pair, PairMeasured
from provision.remote import ssh
from provision.remote.session import Session
from provision.survey import parse_output

_BEGIN = "===PROVISION-CERTIFY-BEGIN==="  # as hostside/certify.py writes it
_PORTS = range(32768, 60999)  # as doctor/reachability.py
_HOST_S, _PAIR_S = 90, 40  # of one answer: every core and GPU works for seconds, and PyTorch is imported; TCP is measured six times
_WAIT_S = 20  # the later side of a pair may begin that much later; more of them than ssh starts at once begin later still
_PER_HOST_S = 0.3
_TIMES_AGAIN = 3  # that a suspect is measured: the best counts, because a busy moment makes slow, and none fast
_WHY = 300  # letters of an error

_Pair = tuple[str, str]
_Measured = TypeVar("_Measured", bound=Answer)


@dataclass(frozen=True)
class Target:
    """How a host is measured: the address at which others reach it, and a Python there. ``torch``: whether that has PyTorch."""

    address: str
    python: str = "python3"
    torch: bool = False


def rounds(session: Session, targets: Mapping[str, Target], state: State) -> None:
    """Measure, round by round, until `decisions` asks for no more; what was found is in ``state``."""
    while (planned := decisions.next_round(state)) is not None:
        state.rounds += 1
        title = "Measure hosts" if state.rounds == 1 else "Measure pairs" if state.rounds <= state.planned else "Measure suspects again"
        session.progress.stage(f"{title} (round {state.rounds} of at most {state.planned + decisions.EXTRA_ROUNDS})")
        _round(session, targets, state, planned)


def _round(session: Session, targets: Mapping[str, Target], state: State, planned: Round) -> None:
    times = 1 if state.rounds <= state.planned else _TIMES_AGAIN
    orders = {name: _host_order(targets[name], times, len(planned.hosts)) for name in planned.hosts}
    for pair in planned.pairs:
        orders |= _pair_orders(pair, targets, {"mtu": state.mtu(*pair), "times": times}, len(planned.pairs))
    scripts = {name: resources.inline_command("certify.py", interpreter=shlex.quote(targets[name].python)) for name in orders}
    stdin = {name: json.dumps(order).encode() for name, order in orders.items()}
    bound = max((float(str(order["seconds"])) for order in orders.values()), default=0.0) + ssh.TIMEOUT_S / 2
    answers = ssh.run(session, scripts, stdin=stdin, timeout=bound)
    for name in planned.hosts:
        measured, why = _read(HostMeasured, answers[name])
        if measured is not None:
            state.measured.setdefault(name, []).append(measured)
        elif state.rounds == 1:
            state.lost[name] = why
    for caller, answerer in planned.pairs:
        found, why = _read(PairMeasured, answers[caller])
        state.pairs.append(Pair(round=state.rounds, caller=caller, answerer=answerer, measured=found or PairMeasured(error=why)))


def _host_order(target: Target, times: int, hosts: int) -> dict[str, object]:
    # Hosts that share a machine, as in a sandbox, wait for each other.
    seconds = _HOST_S + int(_PER_HOST_S * hosts)
    return {"task": "host", "seconds": seconds, "address": target.address, "torch": target.torch, "times": times}


def _pair_orders(pair: _Pair, targets: Mapping[str, Target], figures: Mapping[str, int], pairs: int) -> dict[str, dict[str, object]]:
    """The orders of both sides; who does not know the key of this pair and round is not answered."""
    wait = _WAIT_S + int(_PER_HOST_S * min(2 * pairs, ssh.PARALLEL))
    key, ports = secrets.token_hex(32), secrets.SystemRandom().sample(_PORTS, 3)
    same = {"task": "pair", "seconds": wait + _PAIR_S, "key": key, "ports": ports, "wait": wait, **figures}

    def order(me: str, peer: str) -> dict[str, object]:
        addresses = {"address": targets[me].address, "peer_address": targets[peer].address}
        return {**same, "call": me == pair[0], "me": me, "peer": peer, **addresses}

    return {pair[0]: order(*pair), pair[1]: order(*reversed(pair))}


def _read(model: type[_Measured], answer: ssh.Answer) -> tuple[_Measured | None, str]:
    """A host's answer, and why there is none."""
    if answer.code == ssh.UNREACHABLE and not answer.out:
        return None, f"not reached: {answer.error}"[:_WHY]
    try:
        document = parse_output(answer.out, mark=_BEGIN, what="the measurement")
        return model.model_validate_json(json.dumps(document)), ""
    except ValidationError:
        return None, "the measurement gave an invalid answer"
    except ProvisionError as error:
        said = answer.error if answer.code is None or answer.code > 0 else error.what
        return None, f"the measurement did not end: {said}"[:_WHY]
