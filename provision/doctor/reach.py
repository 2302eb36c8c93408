"""Has hosts look at each other: one more round trip, on all of them at the same time (`hostside/reach.py`).

A host opens one port on its own address for seconds, and only who proves to know this run's key gets an answer. The key travels
through standard input, so no process list shows it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from provision import facts
from provision.base import resources
from provision.base.errors import ProvisionError
from provision.base.problems import Problem
from provision.doctor.checks.model import Answer
from provision.facts import Facts
from provision.inventory import Host
from provision.remote.ansible import Event
from provision.remote.session import Session

AT_ONCE = 50  # hosts that look at each other; of more, each looks at those of its own fifty
_BEGIN = "===PROVISION-REACH-BEGIN==="  # as hostside/reach.py writes it
_PORTS = range(32768, 60999)  # of which Linux gives ports to programs that name none, as MPI, NCCL and PyTorch do
_WAIT_S = 8.0  # the last host may begin that much later than the first
_WAIT_PER_HOST_S = 0.25
_FLOW_PER_HOST_S = 3.0  # two measurements with each other host, that wait for each other


def look(session: Session, known: Mapping[str, Facts], *, bandwidth: bool = False) -> tuple[dict[str, Answer], list[Problem]]:
    """What each host saw of the others, and which hosts could not look.

    Args:
        known: facts of the hosts that answered the survey.
        bandwidth: whether they measure the way to each other, too.
    """
    able = [host for host in session.inventory.hosts if host.name in known and _address(known[host.name])]
    answers: dict[str, Answer] = {}
    problems: list[Problem] = []
    for group in (able[start : start + AT_ONCE] for start in range(0, len(able), AT_ONCE)):
        if len(group) > 1:
            said = _play(session, orders(group, known, bandwidth=bandwidth))
            for host in group:
                try:
                    answers[host.name] = read(said.get(host.name, ""))
                except ProvisionError as error:
                    what = f"it could not look at the other hosts: {error.what}"
                    heard = said.get(host.name, "")
                    problems.append(Problem("warning", what, host=host.name, said="" if _BEGIN in heard else heard))
    return answers, problems


def _address(found: Facts) -> str | None:
    """The address at which others reach the host; None where it is not its own (translated on the way)."""
    connection = found.network.ssh_connection
    return connection.server_address if connection.interface else None


def orders(group: Sequence[Host], known: Mapping[str, Facts], *, bandwidth: bool) -> dict[str, dict[str, Any]]:
    """What each host is to do, as hostside/reach.py reads it, and the Python to do it with."""
    key = secrets.token_hex(32)
    peers = [
        {
            "name": host.name,
            "address": _address(known[host.name]),
            "ports": secrets.SystemRandom().sample(_PORTS, 3),
            "user": host.user or known[host.name].user.name,
            "ssh_port": known[host.name].network.ssh_connection.server_port or 22,
        }
        for host in group
    ]
    made = {}
    for number, me in enumerate(peers):
        found = known[str(me["name"])]
        made[str(me["name"])] = {
            "python": found.python.executable or "python3",
            "order": {
                "key": key,
                "me": me["name"],
                "address": me["address"],
                "ports": me["ports"],
                "seconds": _WAIT_S + len(group) * _WAIT_PER_HOST_S,
                "flow_seconds": bandwidth * len(group) * _FLOW_PER_HOST_S,
                "ssh": bool(found.mpi.found or found.installed.manifest),  # mpirun is what needs it
                # Hosts whose numbers add up to the same are pairs of one round.
                "peers": [peers[(total - number) % len(peers)] for total in range(len(peers)) if (total - 2 * number) % len(peers)],
            },
        }
    return made


def _play(session: Session, made: Mapping[str, Any]) -> dict[str, str]:
    said: dict[str, str] = {}

    def note(event: Event) -> None:
        if event.kind in ("ok", "changed"):
            said[event.host] = str(event.result.get("stdout", ""))
        elif event.kind in ("failed", "unreachable"):
            said[event.host] = event.text

    session.play(
        resources.folder("playbooks") / "reach.yml",
        "Reach",
        hosts=list(made),
        extra_vars={
            "provision_reach": made,
            "provision_reach_program": resources.inline_command("reach.py", interpreter="").strip(),
        },
        on_event=note,
    )
    return said


def read(said: str) -> Answer:
    """A host's answer. Raises ProvisionError when it is none."""
    document = facts.parse_output(said, mark=_BEGIN, what="the look at the others")
    try:
        port, problem, peers = document["port"], document["problem"], document["peers"]
        return Answer(
            port=None if port is None else int(port),
            problem=None if problem is None else str(problem),
            tcp={str(name): _tcp(each["tcp"]) for name, each in peers.items()},
            ssh={str(name): None if each["ssh"] is None else str(each["ssh"]) for name, each in peers.items() if "ssh" in each},
            mbit=dict(_measured(peers)),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProvisionError("the look at the others gave an answer that is not understood") from error


def _tcp(said: Mapping[str, Any]) -> dict[int, str]:
    """Port → what a call to it met; nothing where one got through."""
    return {} if "port" in said else {int(port): str(text) for port, text in said["errors"].items()}


def _measured(peers: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, each in peers.items():
        if each.get("mbit") is not None:
            yield str(name), float(each["mbit"])
