"""Whether hosts reach each other: all of them try at the same time, in one round trip (`hostside/reach.py`).

Each host opens one port on its own address for seconds, and only who knows this run's key gets an answer. The key travels through
standard input, so no process list shows it.
"""

from __future__ import annotations

import json
import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import field

from pydantic.dataclasses import dataclass as validated

from provision.base import resources
from provision.base.errors import ProvisionError
from provision.base.problems import Problem
from provision.inventory import Host
from provision.remote import ansible, ssh
from provision.remote.session import Session
from provision.survey.document import parse_answer
from provision.survey.model import Facts

GROUP = 50  # hosts that try to reach each other; of more, each tries those of its own fifty
_BEGIN = "===PROVISION-REACH-BEGIN==="  # as hostside/reach.py writes it
_PORTS = range(32768, 60999)  # Linux gives these to programs that name none, as MPI, NCCL and PyTorch do
_WAIT_S = 8.0  # the last host may begin that much later than the first
_WAIT_PER_HOST_S = 0.25


@validated(frozen=True)
class Reachability:
    """Whether one host reaches the others.

    Args:
        port: where it listened; None if it could not, and ``problem`` says why.
        tcp: peer → port → the error of a connection to it; no ports where one was reached.
        ssh: peer → the error message of ssh, None where the login works; only where it was tried.
    """

    port: int | None
    problem: str | None = None
    tcp: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    ssh: Mapping[str, str | None] = field(default_factory=dict)


def check(session: Session, known: Mapping[str, Facts], *, logins: bool = True) -> tuple[dict[str, Reachability], list[Problem]]:
    """What each host reaches, and which hosts could not try.

    Args:
        known: facts of the hosts that answered the survey.
        logins: try to log in where that should work; else only whether sshd's port is reached.
    """
    able = [host for host in session.inventory.hosts if host.name in known and _address(known[host.name])]
    count = -(-len(able) // GROUP)
    connections: dict[str, Reachability] = {}
    problems: list[Problem] = []
    for group in (able[number::count] for number in range(count)):  # each with hosts of all racks
        if len(group) > 1:
            session.progress.stage("Test connections", [host.name for host in group])
            pythons = {host.name: shlex.quote(known[host.name].python.executable or "python3") for host in group}
            scripts = {name: resources.inline_command("reach.py", interpreter=python) for name, python in pythons.items()}
            stdin = {name: json.dumps(order).encode() for name, order in orders(group, known, logins=logins).items()}
            for name, answer in ssh.run(session, scripts, stdin=stdin, timeout=ansible.ANSWER_S).items():
                try:
                    connections[name] = parse(answer.out if _BEGIN in answer.out else answer.err or answer.error)
                except ProvisionError as error:
                    what = f"its connections to the other hosts could not be checked: {error.what}"
                    message = "" if _BEGIN in answer.out else answer.error
                    problems.append(Problem("warning", what, host=name, message=message, id="survey-failed"))
            if not logins and (problems or any(any(each.tcp.values()) for each in connections.values())):
                break  # the network is of no use
    return connections, problems


def _address(found: Facts) -> str | None:
    """The address at which others reach the host; None where it is not its own (translated on the way)."""
    connection = found.network.ssh_connection
    return connection.server_address if connection.interface else None


def orders(group: Sequence[Host], known: Mapping[str, Facts], *, logins: bool = True) -> Mapping[str, Mapping[str, object]]:
    """Host → its input for hostside/reach.py."""
    key = secrets.token_hex(32)
    peers = [
        {
            "name": host.name,
            "address": _address(known[host.name]),
            "ports": secrets.SystemRandom().sample(_PORTS, 3),
            "user": (host.user or known[host.name].user.name) if logins else None,
            "ssh_port": known[host.name].network.ssh_connection.server_port or 22,
        }
        for host in group
    ]
    made = {}
    for number, (host, me) in enumerate(zip(group, peers, strict=True)):
        found = known[host.name]
        made[host.name] = {
            "key": key,
            "me": host.name,
            "address": me["address"],
            "ports": me["ports"],
            "seconds": _WAIT_S + len(group) * _WAIT_PER_HOST_S,
            "ssh": bool(not logins or found.mpi.found or found.installed.was_completed),  # mpirun needs it
            "peers": peers[number + 1 :] + peers[:number],  # each begins with another, so that no host gets all logins at once
        }
    return made


def parse(output: str) -> Reachability:
    """The answer in a host's output. Raises ProvisionError when there is none."""
    return parse_answer(Reachability, output, _BEGIN, "the check of connections")
