"""The processes of one job on all its hosts: told where to meet, started, ended.

Ranks of this machine are child processes (processes.py), those of others run behind an agent that is reached over ssh (remote.py).
"""

from __future__ import annotations

import contextlib
import secrets
import sys
import threading
import time
from typing import Mapping, NamedTuple, Sequence, Union

from collective_core.errors import CollectiveError
from collective_core.launch import this_host
from collective_core.launch.mailbox import Mailbox
from collective_core.launch.processes import Processes, rank_settings
from collective_core.launch.remote import SSH, Remote
from collective_core.runtime import horovod_variables, network, torch_variables

#: Seconds that the other ranks get to say what they know when one has failed, before they are ended.
GRACE = 1.5
#: Seconds from asking ranks to end to ending them.
PATIENCE = 2.5
#: Of a host itself.
LOOPBACK = "127.0.0.1"
Group = Union[Processes, Remote]


class _Meeting(NamedTuple):
    """The place where ranks meet. ``variables``: for the engine (launchers.py). ``master``: address and port for torch.distributed.

    ``addresses``: of the hosts of a job that has several, as far as they are known.
    """

    variables: Mapping[str, str]
    master: tuple[str, int]
    addresses: Mapping[str, str]


class Job:
    """``ranks_of``: the ranks of every host. ``ways``: of hosts that are not this machine, as of Host. The rest as of :class:`Runner`."""

    def __init__(
        self,
        ranks_of: Mapping[str, Sequence[int]],
        ways: Mapping[str, Sequence[str]],
        environment: Mapping[str, str],
        python: str = sys.executable,
        directory: str | None = None,
        ssh: Sequence[str] = SSH,
        start_timeout: float = 60.0,
    ) -> None:
        self.host_of = {rank: host for host, ranks in ranks_of.items() for rank in ranks}
        self._ranks_of = ranks_of
        self._ways = ways
        self._environment = environment
        self._python = python
        self._directory = directory
        self._ssh = ssh
        self._start_timeout = start_timeout
        self._groups: list[Group] = []

    def start(self, mailbox: Mailbox, call: bytes = b"", program: Sequence[str] = ()) -> None:
        """Starts all ranks with a packed call or a program. Raises :class:`CollectiveError` naming the host; then call :meth:`end`."""
        remotes: dict[str, Remote] = {}
        for host in self._ranks_of:
            if host in self._ways:
                remotes[host] = Remote(host, self._python, self._ssh, self._ways[host])
                self._groups.append(remotes[host])
        meeting = self._meeting_point(remotes, equal_pythons=not program)
        for host, ranks in self._ranks_of.items():
            path, address = None if host in self._ways else sys.path, meeting.addresses.get(host, "")
            settings = {rank: rank_settings(self._variables(rank, meeting), path, len(ranks), address) for rank in ranks}
            if host in remotes:
                remotes[host].start(settings, call, mailbox, self._environment, self._directory, program)
            else:
                self._groups.append(Processes(settings, call, mailbox, self._environment, self._directory, self._python, program))

    def _meeting_point(self, remotes: Mapping[str, Remote], equal_pythons: bool) -> _Meeting:
        """Where the ranks meet. Waits for the agents."""
        if not remotes:
            return _Meeting({"COLLECTIVE_STORE": f"local:{secrets.token_hex(8)}"}, (LOOPBACK, network.free_port()), {})
        deadline = time.monotonic() + self._start_timeout
        met = {host: remote.meet(deadline) for host, remote in remotes.items()}
        mine = this_host.python()
        other = [f"{host} has {said['python']}" for host, said in met.items() if said["python"] != mine]
        if other and equal_pythons:
            text = f"functions travel between equal Pythons only: this one is {mine}, {', '.join(other)}. Pass python=… for all hosts"
            raise CollectiveError(text, "mismatch")
        first = next(iter(self._ranks_of))
        # This machine is reached by the others at the address at which they see it.
        here = next(iter(met.values()))["controller"]
        if first in met:
            address, port, master_port = met[first]["address"] or first, met[first]["port"], met[first]["master_port"]
        else:
            address, (port, master_port) = here, network.free_ports(2)
            if not address:
                text = f"{next(iter(met))} does not know the address of this machine, where rank 0 is: name another host first"
                raise CollectiveError(text, "invalid")
        one_host = len(self._ranks_of) == 1
        return _Meeting(
            {"COLLECTIVE_STORE": f"{address}:{port}", "COLLECTIVE_SECRET": secrets.token_hex(32)},
            (LOOPBACK if one_host else address, master_port),
            {} if one_host else {host: met[host]["address"] if host in met else here for host in self._ranks_of},
        )

    def _variables(self, rank: int, meeting: _Meeting) -> dict[str, str]:
        hosts = [self.host_of[each] for each in sorted(self.host_of)]
        own = {"COLLECTIVE_RANK": str(rank), "COLLECTIVE_SIZE": str(len(hosts))}
        own.update(horovod_variables.rank_variables(rank, hosts))
        # What the user has said for all ranks counts more.
        own.update(torch_variables.rank_variables(rank, hosts, meeting.master, self._environment))
        chosen = {"COLLECTIVE_START_TIMEOUT", "HOROVOD_GLOO_TIMEOUT_SECONDS"}.intersection(self._environment)
        return {**meeting.variables, **own, **({} if chosen else {"COLLECTIVE_START_TIMEOUT": str(self._start_timeout)})}

    def end(self) -> None:
        """Ends all ranks; see :func:`end_all`."""
        end_all(self._groups)


def end_all(groups: Sequence[Group]) -> None:
    """Ends all processes, everywhere at the same time. Ctrl-C does not interrupt it: it takes a few seconds at most."""

    def work() -> None:
        for group in groups:
            group.ask_to_end()
        deadline = time.monotonic() + PATIENCE
        for group in groups:
            group.wait(deadline)
        for group in groups:
            group.kill()

    ending = threading.Thread(target=work)
    ending.start()
    while ending.is_alive():
        with contextlib.suppress(KeyboardInterrupt):
            ending.join(0.1)
