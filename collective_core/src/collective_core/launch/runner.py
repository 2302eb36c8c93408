"""``Runner(np=4).run(train, lr=0.1)``: a function on all ranks, each one's result as a list.

On this machine ranks are child processes; on others an agent, reached over ssh, starts them (agent.py). The function, its arguments
and the job's secret travel through pipes and ssh only (on Spark: as Spark's own tasks do). Output appears as it comes, each line with
its rank.
"""

from __future__ import annotations

import contextlib
import secrets
import sys
import threading
import time
from typing import Any, Callable, Mapping, Sequence, Union

from collective_core.errors import CollectiveError
from collective_core.launch import function, this_host
from collective_core.launch.hosts import Host, Hosts, place, read
from collective_core.launch.mailbox import Mailbox
from collective_core.launch.outcomes import Outcomes, show
from collective_core.launch.processes import Processes, rank_settings
from collective_core.launch.remote import SSH, Remote

#: Seconds that the other ranks get to say what they know when one has failed, before they are ended.
GRACE = 1.5
#: Seconds that ranks get to end when all their functions have returned: a thread of theirs may never.
LEAVING = 15.0
#: Seconds from asking ranks to end to ending them.
PATIENCE = 3.0
THIS_MACHINE = "localhost"
Group = Union[Processes, Remote]


class Runner:
    """Runs functions on the ranks of a job.

    ``np``: how many ranks. Negative: so many processes of this machine, whatever ``hosts`` says. Without it: one per slot of the
    hosts. ``hosts``: ``"a:2,b:2"``, a dictionary, a list, or a host file; without them all ranks are on this machine. ``env``:
    variables for all ranks. ``python``: the interpreter on all hosts (this one's path). ``directory``: where the ranks work (this
    process's on this machine, the home elsewhere). ``ssh``: the command that reaches a host. ``start_timeout``: seconds for hosts
    to answer and ranks to meet. ``prefix``: whether each line of output begins with its rank. ``spark``: a SparkSession whose
    executors run the ranks as one barrier stage (spark.py); ``np`` is then how many, by default as many as Spark runs at once.

    Raises :class:`CollectiveError` (kind ``invalid``) for numbers and hosts that make no sense.
    """

    def __init__(
        self,
        np: int | None = None,
        hosts: Hosts = None,
        env: Mapping[str, str] | None = None,
        python: str = sys.executable,
        directory: str | None = None,
        ssh: Sequence[str] = SSH,
        start_timeout: float = 60.0,
        prefix: bool = True,
        spark: Any = None,
    ) -> None:
        if np == 0:
            raise CollectiveError("np is the number of ranks: at least 1, or negative for processes of this machine", "invalid")
        if spark is not None and hosts:
            raise CollectiveError("hosts and spark are two answers to where ranks run: give one", "invalid")
        named = read(hosts) if np is None or np > 0 else []
        if np is None and not named and spark is None:
            raise CollectiveError("say how many ranks (np) or on which hosts", "invalid")
        self._spark = spark if np is None or np > 0 else None
        self._np = np
        self._ranks_of = place(named or [Host(THIS_MACHINE, abs(np or 1))], None if np is None else abs(np))
        self._here = [host.name for host in named or [Host(THIS_MACHINE, 1)] if host.is_here]
        self._size = sum(len(ranks) for ranks in self._ranks_of.values())
        self._environment = {str(name): str(value) for name, value in (env or {}).items()}
        self._python = python
        self._directory = directory
        self._ssh = ssh
        self._start_timeout = start_timeout
        self._prefix = prefix

    def run(self, function_: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Calls ``function_(*args, **kwargs)`` on every rank; returns what each returned, by rank.

        The function calls ``init`` itself. Raises :class:`RankFailedError` for the rank that failed first, when all have ended;
        :class:`NotSendableError` naming the part of function, arguments or result that cannot travel; and
        :class:`CollectiveError` for a host that cannot be used. Ctrl-C ends all ranks everywhere.
        """
        call = function.pack_call(function_, args, kwargs)
        if self._spark is not None:
            from collective_core.launch import spark

            return spark.run(self._spark, self._np, call, self._environment, self._start_timeout, self._prefix)
        mailbox = Mailbox()
        groups: list[Group] = []
        try:
            remotes: dict[str, Remote] = {}
            for host in self._ranks_of:
                if host not in self._here:
                    remotes[host] = Remote(host, self._python, self._ssh)
                    groups.append(remotes[host])
            meeting = self._meeting_point(remotes)
            for host, ranks in self._ranks_of.items():
                path = sys.path if host in self._here else None
                settings = {rank: rank_settings(self._variables(rank, meeting), path) for rank in ranks}
                if host in remotes:
                    remotes[host].start(settings, call, mailbox, self._environment, self._directory)
                else:
                    groups.append(Processes(settings, call, mailbox, self._environment, self._directory, self._python))
            return self._follow(mailbox)
        finally:
            mailbox.close()
            _end(groups)

    def _meeting_point(self, remotes: Mapping[str, Remote]) -> dict[str, str]:
        """Variables that tell the ranks where to meet (launchers.py). Waits for the agents."""
        if not remotes:
            return {"COLLECTIVE_STORE": f"local:{secrets.token_hex(8)}"}
        deadline = time.monotonic() + self._start_timeout
        met = {host: remote.meet(deadline) for host, remote in remotes.items()}
        mine = this_host.python()
        other = [f"{host} has {said['python']}" for host, said in met.items() if said["python"] != mine]
        if other:
            text = f"functions travel between equal Pythons only: this one is {mine}, {', '.join(other)}. Pass python=… for all hosts"
            raise CollectiveError(text, "mismatch")
        first = next(iter(self._ranks_of))
        if first in met:
            address, port = met[first]["address"] or first, met[first]["port"]
        else:
            # Rank 0 is here: the others reach us at the address at which they see us.
            address, port = next(iter(met.values()))["controller"], this_host.free_port()
            if not address:
                text = f"{next(iter(met))} does not know the address of this machine, where rank 0 is: name another host first"
                raise CollectiveError(text, "invalid")
        return {"COLLECTIVE_STORE": f"{address}:{port}", "COLLECTIVE_SECRET": secrets.token_hex(32)}

    def _variables(self, rank: int, meeting: Mapping[str, str]) -> dict[str, str]:
        place = {"COLLECTIVE_RANK": str(rank), "COLLECTIVE_SIZE": str(self._size)}
        return {**meeting, **place, "COLLECTIVE_START_TIMEOUT": str(self._start_timeout)}

    def _follow(self, mailbox: Mailbox) -> list[Any]:
        outcomes = Outcomes({rank: host for host, ranks in self._ranks_of.items() for rank in ranks})
        end: float | None = None
        while not outcomes.complete and (end is None or time.monotonic() < end):
            frame = mailbox.get(timeout=None if end is None else max(0.0, end - time.monotonic()))
            if frame is None:
                continue
            if frame.kind in ("out", "err"):
                show(frame, self._prefix)
            outcomes.note(frame)
            if end is None and (outcomes.failed or outcomes.returned):
                end = time.monotonic() + (GRACE if outcomes.failed else LEAVING)
        return outcomes.results()


def _end(groups: Sequence[Group]) -> None:
    """Ends all ranks, everywhere at the same time. Ctrl-C does not interrupt it: it takes a few seconds at most."""

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


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int = 1,
    hosts: Hosts = None,
    env: Mapping[str, str] | None = None,
    start_timeout: float = 60.0,
) -> list[Any]:
    """``horovod.run``: calls ``func`` on ``np`` ranks and returns each one's result; see :class:`Runner`."""
    return Runner(np, hosts, env, start_timeout=start_timeout).run(func, *args, **dict(kwargs or {}))
