"""``Runner(np=4).run(train, lr=0.1)``: a function on all ranks, each one's result as a list.

On this machine ranks are child processes; on others an agent, reached over ssh, starts them (agent.py). The function, its arguments
and the job's secret travel through pipes and ssh only (on Spark: as Spark's own tasks do). Output appears as it comes, each line with
its rank.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any, Callable, Iterator, Mapping, Sequence

from collective_core.errors import CollectiveError
from collective_core.launch import cluster, function, timeouts
from collective_core.launch.elastic_driver import NAME, Driver, Limits, cooldown_of, limits_of
from collective_core.launch.frames import Frame
from collective_core.launch.hosts import Host, Hosts, place_ranks, read, ways
from collective_core.launch.job import GRACE, Job
from collective_core.launch.kept_output import KeptOutput
from collective_core.launch.mailbox import Mailbox
from collective_core.launch.outcomes import Outcomes, show
from collective_core.launch.remote import SSH
from collective_core.lazy import extension

#: Seconds that ranks get to end when all their functions have returned: a thread of theirs may never.
LEAVING = 15.0
THIS_MACHINE = "localhost"
#: Ranks whose files sort by name where nobody says how many there can be.
MAX_NUMBERED = 1000


class Runner:
    """Runs functions on the ranks of a job.

    ``np``: how many ranks. Negative: so many processes of this machine, whatever ``hosts`` says. Without it: one per slot of the hosts;
    without hosts, too, all slots of the cluster that this host belongs to (cluster.py). ``hosts``: ``"a:2,b:2"``, a dictionary, a list, a
    host file, or an inventory of Ansible's (inventory.py); with ``np`` alone all ranks are on this machine. ``env``: variables for all
    ranks. ``python``: the interpreter on all hosts (this one's path). ``directory``: where the ranks work (this process's on this machine,
    the home elsewhere). ``ssh``: the command that reaches a host; without it hosts that ``provision up`` has introduced to each other are
    reached by what it has left here. ``start_timeout``: seconds for hosts to answer and ranks to meet. ``prefix``: whether each line of
    output begins with its rank. ``spark``: a SparkSession whose executors run the ranks as one barrier stage; ``np`` is then
    how many, by default as many as Spark runs at once. ``ray``: True, or what each rank gets, ``{"CPU": 1, "GPU": 1}``: the ranks are
    actors of the Ray cluster that this process has joined; by default as many as it has room for. ``min_np``, ``max_np``: an
    elastic job, whose ranks come and go between these numbers (collective_core.torch.elastic); ``np`` is how many it needs to begin, and
    the most where ``max_np`` is not given; ``hosts`` may then be a function without arguments, which is asked every second, and the most
    is all of their slots. ``elastic_timeout``: seconds for which such a job waits with fewer than ``min_np`` ranks; ``reset_limit``: after
    how many changes of its ranks it ends; ``cooldown_range``: seconds for which a host that fails again is set aside, at first and at
    most. ``output_filename``: a folder for what each rank prints (kept_output.py). ``verbose``: say which ranks are started where.

    Raises :class:`CollectiveError` (kind ``invalid``) for numbers and hosts that make no sense.
    """

    def __init__(
        self,
        np: int | None = None,
        hosts: Hosts | Callable[[], Hosts] = None,
        env: Mapping[str, str] | None = None,
        python: str = sys.executable,
        directory: str | None = None,
        ssh: Sequence[str] = SSH,
        start_timeout: float | None = None,
        prefix: bool = True,
        spark: Any = None,
        ray: Any = None,
        min_np: int | None = None,
        max_np: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: Sequence[float] | None = None,
        elastic_timeout: float | None = None,
        output_filename: str | None = None,
        verbose: bool = False,
    ) -> None:
        if np == 0:
            raise CollectiveError("np is the number of ranks: at least 1, or negative for processes of this machine", "invalid")
        if sum(bool(given) for given in (hosts, spark, ray)) > 1:
            raise CollectiveError("hosts, spark and ray are answers to where ranks run: give one", "invalid")
        start_timeout = timeouts.start() if start_timeout is None else start_timeout
        self._limits = limits_of(
            np, min_np, max_np, start_timeout, unlimited=callable(hosts) and min_np is not None, waiting=elastic_timeout, resets=reset_limit
        )
        self._cooldown = cooldown_of(cooldown_range)
        if self._limits and (spark or ray):
            raise CollectiveError("an elastic job (min_np, max_np) needs hosts, not Spark or Ray", "invalid")
        if callable(hosts) and self._limits is None:
            raise CollectiveError("hosts as a function is for elastic jobs: pass min_np", "invalid")
        self._discover = (lambda: cluster.reached(read(hosts()), ssh)) if callable(hosts) else None
        named = read(hosts() if callable(hosts) else hosts) if np is None or np > 0 else []
        if np is None and not named and not spark and not ray:
            named = cluster.find() or []
            if not named:
                raise CollectiveError("say how many ranks (np) or on which hosts", "invalid")
        self._spark = spark if np is None or np > 0 else None
        self._ray = ray if np is None or np > 0 else None
        self._np = np
        self._hosts = cluster.reached(named, ssh) or [Host(THIS_MACHINE, self._limits.most if self._limits else abs(np or 1))]
        self._ranks_of = {} if self._limits else place_ranks(self._hosts, None if np is None else abs(np))
        self._environment = {str(name): str(value) for name, value in (env or {}).items()}
        self._python = python
        self._directory = directory
        self._ssh = ssh
        self._start_timeout = start_timeout
        self._prefix = prefix
        self._output_filename = output_filename
        self._verbose = verbose

    def run(self, function_: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Calls ``function_(*args, **kwargs)`` on every rank; returns what each returned, by rank.

        The function calls ``init`` itself. Raises :class:`RankFailedError` for the rank that failed first, when all have ended;
        :class:`NotSendableError` naming the part of function, arguments or result that cannot travel; and
        :class:`CollectiveError` for a host that cannot be used. Ctrl-C ends all ranks everywhere.
        """
        call = function.pack_call(function_, args, kwargs)
        if self._spark is not None:
            return self._run_on("spark", self._spark, call)
        if self._ray:
            return self._run_on("ray", self._ray, call)
        if self._limits:
            return self._run_elastic(self._limits, call)
        mailbox = Mailbox()
        job = Job(self._ranks_of, ways(self._hosts), self._environment, self._python, self._directory, self._ssh, self._start_timeout)
        if self._verbose:
            for host, ranks in self._ranks_of.items():
                print(f"{NAME}: {host}: ranks {ranks[0]} to {ranks[-1]}", file=sys.stderr, flush=True)
        try:
            job.start(mailbox, call)
            with self._showing(len(job.host_of)) as show_line:
                return self._follow(mailbox, job.host_of, show_line)
        finally:
            mailbox.close()
            job.end()

    @contextlib.contextmanager
    def _showing(self, ranks: int) -> Iterator[Callable[[Frame], None]]:
        """What shows a piece of output, and keeps it where that is wanted."""
        kept = KeptOutput(self._output_filename, ranks) if self._output_filename else None

        def show_line(frame: Frame) -> None:
            if kept is not None:
                kept.note(frame)
            show(frame, self._prefix)

        try:
            yield show_line
        finally:
            if kept is not None:
                kept.close()

    def _run_on(self, framework: str, given: Any, call: Any) -> list[Any]:
        return extension(framework).run(given, self._np, call, self._environment, self._start_timeout, self._prefix)  # type: ignore[no-any-return]

    def _run_elastic(self, limits: Limits, call: bytes) -> list[Any]:
        with self._showing(min(limits.most, MAX_NUMBERED)) as show_line:
            return self._follow_elastic(limits, call, show_line)

    def _follow_elastic(self, limits: Limits, call: bytes, show_line: Callable[[Frame], None]) -> list[Any]:
        ending = Driver(
            self._discover,
            limits,
            show_line,
            call,
            environment=self._environment,
            python=self._python,
            directory=self._directory,
            ssh=self._ssh,
            hosts=self._hosts,
            cooldown=self._cooldown,
        ).run()
        if ending.failed:
            rank, host, last = ending.failed
            outcomes = Outcomes({rank: host})
            for frame in last:
                outcomes.note(frame)
            return outcomes.results()
        return [function.unpack(value) for value in ending.values]

    def _follow(self, mailbox: Mailbox, host_of: Mapping[int, str], show_line: Callable[[Frame], None]) -> list[Any]:
        outcomes = Outcomes(host_of)
        end: float | None = None
        while not outcomes.complete and (end is None or time.monotonic() < end):
            frame = mailbox.get(timeout=None if end is None else max(0.0, end - time.monotonic()))
            if frame is None:
                continue
            if frame.kind in ("out", "err"):
                show_line(frame)
            outcomes.note(frame)
            if end is None and (outcomes.failed or outcomes.returned):
                end = time.monotonic() + (GRACE if outcomes.failed else LEAVING)
        return outcomes.results()
