"""Driver of an elastic job, where it was started: workers on the hosts that are there, new ones in the place of those that died.

Every worker is a process of its own, here (launch/processes.py) or behind an agent over ssh (launch/remote.py), and is known by a number;
which rank it is, the rendezvous server says. A worker that was killed, or whose host is gone, is replaced. So is one that ends by itself,
with an exception or an exit code, while the others go on: it may be a fault of its GPU. Where that happens again it is the host, and where
it happens again and again, or with the same traceback on two hosts, the program, which ends the job (elastic/failure_policy.py).
"""

from __future__ import annotations

import json
import secrets
import sys
import threading
import time
from typing import Callable, Mapping, NamedTuple, Sequence

from collective_core.elastic import worker
from collective_core.elastic.failure_policy import Cooldown, FailurePolicy
from collective_core.elastic.generations import ElasticMembership
from collective_core.elastic.rendezvous_server import RendezvousServer
from collective_core.errors import CollectiveError
from collective_core.launch import frames, this_host, timeouts
from collective_core.launch.frames import NO_RANK, Frame
from collective_core.launch.hosts import Host
from collective_core.launch.job import GRACE, Group, end_all
from collective_core.launch.mailbox import Mailbox
from collective_core.launch.outcomes import LOST
from collective_core.launch.processes import Processes, rank_settings
from collective_core.launch.remote import SSH, Remote
from collective_core.launch.tracebacks import Tracebacks, place_of
from collective_core.runtime import launchers

#: Seconds between looks at the hosts, and at what it is time for.
DISCOVERY, TICK = 1.0, 0.25
#: Seconds that ranks get to find each other: all of them are there already.
MEETING = 10.0
#: Seconds that processes get to end when all their functions have returned.
LEAVING = 15.0
#: Frames that are taken in before anything else is looked after.
MAX_FRAMES = 512
#: Connections to one host that are being made at the same time.
MAX_CALLS = 4
#: Exit codes by which a shell says that a signal ended its program.
FIRST_SIGNAL, LAST_SIGNAL = 128, 192
#: Before what is said here and not by a rank.
NAME = "collective_core.launch"
#: Ranks, where nobody says how many at most: as many as the hosts have slots.
UNLIMITED = 1 << 20
Discover = Callable[[], Sequence[Host]]


class Limits(NamedTuple):
    """``least`` and ``most`` ranks, and how many it needs to ``begin``, for which it waits for ``start_timeout`` seconds.

    ``waiting``: seconds for which fewer than ``least`` wait for more.
    ``resets``: how often the ranks may change; None: as often as they do. ``restarts``: generations in which workers may end by themselves;
    None: so many as failure_policy.py says.
    """

    least: int
    most: int
    begin: int
    start_timeout: float = timeouts.START
    waiting: float = timeouts.ELASTIC
    resets: int | None = None
    restarts: int | None = None


def limits_of(
    np: int | None,
    least: int | None,
    most: int | None,
    start_timeout: float,
    *,
    unlimited: bool = False,
    waiting: float | None = None,
    resets: int | None = None,
    restarts: int | None = None,
) -> Limits | None:
    """Of an elastic job that needs ``np`` ranks to begin; None if it is none. As Horovod has it, ``least`` is ``np`` where it is not given.

    ``unlimited``: without ``most`` it has as many as the hosts have slots, and not only ``np``: their number may change.
    ``waiting``, ``resets``, ``restarts``: as of :class:`Limits`. Raises :class:`CollectiveError` for numbers that make no sense.
    """
    if least is None and most is None and not unlimited:
        return None
    utmost = most or (None if unlimited else np) or UNLIMITED
    fewest = (np or 1) if least is None else least
    limits = Limits(fewest, utmost, np or fewest, start_timeout, timeouts.elastic() if waiting is None else waiting, resets, restarts)
    if not 0 < limits.least <= limits.begin <= limits.most:
        text = f"an elastic job needs 1 <= min-np <= np <= max-np, not {limits.least}, {limits.begin}, {limits.most}"
        raise CollectiveError(text, "invalid")
    if not limits.waiting > 0 or (resets is not None and resets < 0):
        raise CollectiveError(f"elastic-timeout {limits.waiting:g} and reset-limit {resets} cannot be meant", "invalid")
    return limits


def cooldown_of(seconds: Sequence[float] | None) -> Cooldown:
    """``seconds``: at first, and at most; None for our own numbers. Raises :class:`CollectiveError` for others than two that rise."""
    if seconds is None:
        return Cooldown()
    if len(seconds) != 2 or not 0 < seconds[0] <= seconds[1]:
        raise CollectiveError(f"a cool-down is two numbers of seconds that rise, not {tuple(seconds)}", "invalid")
    return Cooldown(*seconds)


def failure_policy(restarts: int | None, is_only_host: bool) -> FailurePolicy:
    """``restarts``: as of :class:`Limits`."""
    if restarts is None:
        return FailurePolicy()
    # The only host of a job is not blacklisted before the user's number is reached: no other can take its place.
    return FailurePolicy(restarts, of_host=restarts + 1) if is_only_host else FailurePolicy(restarts)


class Ending(NamedTuple):
    """End of a job. ``values``: by rank, what its function returned. ``failed``: the rank that ended it, its host, its last frames."""

    values: list[bytes]
    failed: tuple[int, str, list[Frame]] | None


class Driver:
    """``discover``: the hosts with their slots, asked every second. ``show``: gets what the workers print, with their rank last known.

    Without ``discover`` it is always ``hosts``. ``call`` is what they run (function.py), or ``program``. The rest as of :class:`Runner`.
    """

    def __init__(
        self,
        discover: Discover | None,
        limits: Limits,
        show: Callable[[Frame], None],
        call: bytes = b"",
        program: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        python: str = sys.executable,
        directory: str | None = None,
        ssh: Sequence[str] = SSH,
        hosts: Sequence[Host] = (),
        cooldown: Cooldown | None = None,
    ) -> None:
        self._discover, self._hosts, self._limits, self._show = discover, list(hosts), limits, show
        self._call, self._program = call, program
        self._environment = dict(environment or {})
        self._python, self._directory, self._ssh = python, directory, ssh
        self._secret = secrets.token_hex(32)
        self._mailbox = Mailbox()
        self._membership = ElasticMembership(limits.least, limits.start_timeout, begin=limits.begin)
        only_here = discover is None and all(host.is_here for host in hosts)
        self._server = RendezvousServer(self._membership, self._secret, self._wake, only_here)
        self._cooldown = cooldown or Cooldown()
        self._failure_policy = failure_policy(limits.restarts, is_only_host=discover is None and len(self._hosts) == 1)
        self._tracebacks = Tracebacks(lambda _: None)  # by worker
        self._ended_by_itself: dict[int, int] = {}  # generation → the first worker that did
        self._formed = 0  # generations so far
        self._groups: dict[int, Group] = {}
        self._starting = threading.Lock()  # of `_groups` and `_ended`
        self._ended = threading.Event()
        self._connecting: dict[str, threading.Semaphore] = {}  # a host's sshd takes only so many callers at once
        self._host_of: dict[int, str] = {}  # of all workers that ever were
        self._rank_of: dict[int, int] = {}  # the last one that each had
        self._by_rank: list[int] = []  # workers by rank
        self._last: dict[int, list[Frame]] = {}  # worker → what is known of its end
        self._finished: set[int] = set()
        self._reasons: dict[str, str] = {}  # host → why it could not be used
        self._told: set[str] = set()
        self._failed: int | None = None
        self._next = 0

    def run(self) -> Ending:
        """Runs until all ranks of the last generation have ended well, or one has failed by itself.

        Raises :class:`CollectiveError` when there are too few ranks for too long. Nothing is left running.
        """
        looked, enough, end = 0.0, time.monotonic(), float("inf")
        try:
            self._begin()
            while time.monotonic() < end:
                if self._take_in():
                    looked = 0.0  # somebody died: start another at once
                now = time.monotonic()
                if self._is_over():
                    break
                if self._failed is not None:
                    end = min(end, now + GRACE)
                    continue
                if self._have_returned():
                    end = min(end, now + LEAVING)
                if now > looked + DISCOVERY and not self._finished:
                    looked = now
                    self._look(now)
                self._settle()
                self._raise_if_lost()
                if self._waits_for() == 0:
                    enough = now
                elif self._finished or now > enough + self._limits.waiting:
                    raise CollectiveError(self._too_few(), "timeout")
            return self._ending()
        finally:
            with self._starting:
                self._ended.set()
                groups = list(self._groups.values())
            self._mailbox.close()
            self._server.close()
            end_all(groups)

    def _begin(self) -> None:
        """Asks for the hosts for the first time, which must work, and then again and again in a thread of its own, which need not."""
        if self._discover is None:
            slots = sum(host.slots for host in self._hosts)
            if slots < self._limits.least:
                raise CollectiveError(f"{self._limits.least} ranks do not fit into the {slots} slots of the hosts", "invalid")
            return
        discover = self._discover
        self._hosts = list(discover())

        def ask_again() -> None:
            none_before = False
            while not self._ended.wait(DISCOVERY):
                try:
                    found = list(discover())
                    # No host at all is believed when it is said twice: a file that is being written is empty for a moment.
                    if found or none_before:
                        self._hosts = found
                    none_before = not found
                except Exception as error:  # noqa: BLE001 - the user's; what it said last still holds
                    none_before = False
                    self._report(f"the hosts cannot be asked for, those of before stay: {error}")

        threading.Thread(target=ask_again, daemon=True).start()

    def _report(self, text: str) -> None:
        """Says it once."""
        if text not in self._told:
            self._told.add(text)
            print(f"{NAME}: {text}", file=sys.stderr, flush=True)

    def _take_in(self) -> bool:
        """Takes in what has happened, for a moment at most; whether a worker has to be replaced."""
        replace = False
        frame = self._mailbox.get(timeout=TICK)
        for _ in range(MAX_FRAMES):
            if frame is None:
                break
            replace = self._note(frame) or replace
            frame = self._mailbox.get(timeout=0)
        return replace

    def _have_returned(self) -> bool:
        """Whether the functions of all ranks have: a thread of theirs may keep a process."""
        return bool(self._by_rank) and all(any(frame.kind == "value" for frame in self._last.get(each, ())) for each in self._by_rank)

    def _raise_if_lost(self) -> None:
        with self._server.holding():
            lost = bool(self._by_rank) and not self._membership.working and not self._finished
        if lost:
            host = self._host_of[self._by_rank[-1]]
            text = "all ranks of the job are gone, and with them what was committed: begin again from a checkpoint"
            raise CollectiveError(f"{text} (the last one was on {host})", "peer_lost")

    def _wake(self) -> None:
        self._mailbox.put(Frame("wake", NO_RANK, b""))

    def _is_over(self) -> bool:
        return bool(self._by_rank) and self._finished.issuperset(self._by_rank)

    def _ending(self) -> Ending:
        if self._failed is not None:
            rank = self._rank_of.get(self._failed, 0)
            return Ending([], (rank, self._host_of[self._failed], self._last[self._failed]))
        found = {frame.rank: bytes(frame.body) for each in self._by_rank for frame in self._last[each] if frame.kind == "value"}
        return Ending([found[rank] for rank in sorted(found)], None)

    def _waits_for(self) -> int:
        with self._server.holding():
            return 0 if self._membership.is_working else self._membership.waits_for()

    def _too_few(self) -> str:
        reasons = "; ".join(f"{host}: {reason}" for host, reason in self._reasons.items())
        text = f"the job needs {self._waits_for()} more of at least {self._limits.least} ranks"
        return text + (f" ({reasons})" if reasons else "")

    def _note(self, frame: Frame) -> bool:
        """Takes in what happened to a worker; whether it has to be replaced."""
        if frame.kind in ("out", "err"):
            self._tracebacks(frame)
            self._show(self._with_rank(frame))
        elif frame.rank in self._host_of:
            self._last.setdefault(frame.rank, []).append(self._with_rank(frame))
            if frame.kind == "lost":
                self._reasons[self._host_of[frame.rank]] = frame.body.decode(errors="replace")
            elif frame.kind == "exit":
                return self._note_end(frame.rank, frames.code_of(frame))
        return False

    def _with_rank(self, frame: Frame) -> Frame:
        return Frame(frame.kind, self._rank_of.get(frame.rank, 0), frame.body)

    def _note_end(self, number: int, code: int) -> bool:
        with self._server.holding():
            had_rank, was_leaving = number in self._membership.working, number in self._membership.leaving
            if had_rank and code != 0:
                self._server.note_loss(number, self._rank_of[number])
            self._membership.go(number)
        with self._starting:
            group = self._groups.pop(number, None)
        if group is not None:
            threading.Thread(target=group.kill, daemon=True).start()
        if was_leaving:
            return False
        if code == 0 and had_rank:
            self._finished.add(number)
            with self._server.holding():
                self._membership.closed = True
            return False
        host = self._host_of[number]
        killed = code < 0 or FIRST_SIGNAL < code <= LAST_SIGNAL
        # A newcomer that cannot even begin says something about its host, while the others work.
        by_itself = not killed and (number in self._rank_of or not self._by_rank)
        if by_itself and not self._can_do_without(number, code):
            self._failed = self._ended_by_itself.get(self._formed, number) if self._failed is None else self._failed
            return False
        reason = self._reasons.get(host) or ("its worker was killed" if killed else self._last_words(number, code))
        blacklisted = self._failure_policy.is_blacklisted(host, time.monotonic())
        self._report(f"host {host}: {reason}; {'it gets no new workers' if blacklisted else 'another worker is started in its place'}")
        self._cooldown.note(host, time.monotonic())
        if code == LOST and not self._by_rank and self._is_hopeless(host):
            raise CollectiveError(f"host {host} cannot be used: {reason}", "peer_lost")
        return True

    def _can_do_without(self, number: int, code: int) -> bool:
        """Whether the others can go on after this worker has ended by itself, and shall."""
        if not self._by_rank or self._finished or code == 0:
            return False
        now, host = time.monotonic(), self._host_of[number]
        self._failure_policy.note(host, self._formed, now, self._place_of_failure(number))
        self._ended_by_itself.setdefault(self._formed, number)
        with self._server.holding():
            working, there = self._membership.working, list(self._membership.workers.values())
        if not working or self._failure_policy.are_too_many([each.name for each in self._hosts], now):
            return False
        is_blacklisted = self._failure_policy.is_blacklisted
        possible = sum(there.count(each.name) if is_blacklisted(each.name, now) else each.slots for each in self._hosts)
        return self._discover is not None or possible >= self._limits.least

    def _place_of_failure(self, number: int) -> str:
        """As of tracebacks.py, of a worker that has ended by itself."""
        raised = next((json.loads(frame.body) for frame in self._last[number] if frame.kind == "raised"), None)
        return self._tracebacks.place_of(number) if raised is None else place_of(raised["traceback"].encode().splitlines())

    def _last_words(self, number: int, code: int) -> str:
        """How a worker ended by itself, in short; what a function's traceback says is shown as if it had printed it."""
        raised = next((json.loads(frame.body) for frame in self._last[number] if frame.kind == "raised"), None)
        if raised is None:
            return f"its worker ended with exit code {code}"
        for line in raised["traceback"].splitlines():
            self._show(self._with_rank(Frame("err", number, line.encode() + b"\n")))
        return f"its worker raised {raised['type']}" + (f": {raised['text']}" if raised["text"] else "")

    def _is_hopeless(self, host: str) -> bool:
        """Whether the job cannot begin without a host that has failed more than once, and never worked."""
        elsewhere = sum(each.slots for each in self._hosts if each.name != host)
        return self._discover is None and self._cooldown.failures(host) > 1 and elsewhere < self._limits.least

    def _look(self, now: float) -> None:
        """Starts and sends away workers as the hosts that are there say."""
        hosts = list(self._hosts)
        slots = {host.name: host.slots for host in hosts}
        with self._server.holding():
            staying = {number: host for number, host in self._membership.workers.items() if number not in self._membership.leaving}
            surplus = [
                n for host in set(staying.values()) for slot, n in self._membership.slots_of(host).items() if slot >= slots.get(host, 0)
            ]
            knowing = [number for number in self._membership.working if number in staying]
            if knowing and not set(knowing) - set(surplus):
                surplus.remove(min(knowing))  # one stays until others have what the job knows
            for number in surplus:
                self._membership.send_away(number)
                del staying[number]
            taken = {host.name: self._membership.slots_of(host.name) for host in hosts}
        for each in hosts:
            for slot in range(each.slots):
                if slot not in taken[each.name] and len(staying) < self._limits.most and self._may_start(each.name, now):
                    staying[self._start(each, slot, now)] = each.name

    def _may_start(self, host: str, now: float) -> bool:
        return now >= self._cooldown.until(host) and not self._failure_policy.is_blacklisted(host, now)

    def _start(self, host: Host, slot: int, now: float) -> int:
        number = self._next
        self._next += 1
        self._host_of[number] = host.name
        with self._server.holding():
            self._membership.start(number, host.name, now, slot)
        self._connecting.setdefault(host.name, threading.Semaphore(MAX_CALLS))
        starting = threading.Thread(target=self._start_here if host.is_here else self._start_there, args=(host, number), daemon=True)
        starting.start()
        return number

    def _start_here(self, host: Host, number: int) -> None:
        settings = {number: self._settings(host, number, "127.0.0.1", sys.path)}
        try:
            started = Processes(settings, self._call, self._mailbox, self._environment, self._directory, self._python, self._program)
        except CollectiveError as error:
            self._could_not_start(number, error)
        else:
            self._keep(number, started)

    def _keep(self, number: int, group: Group) -> bool:
        """Keeps a group to be ended with the job; whether the job still runs. Else it is ended now."""
        with self._starting:
            if not self._ended.is_set():
                self._groups[number] = group
                return True
        group.ask_to_end()
        group.kill()
        return False

    def _start_there(self, host: Host, number: int) -> None:
        try:
            with self._connecting[host.name]:
                remote = Remote(host.name, self._python, self._ssh, host.way)
                if not self._keep(number, remote):
                    return
                met = remote.meet(time.monotonic() + self._limits.start_timeout)
            if not self._program and met["python"] != this_host.python():
                raise CollectiveError(f"it has Python {met['python']}, this one is {this_host.python()}: pass python=…", "mismatch")
            if not met["controller"]:
                raise CollectiveError("it does not know the address of this machine, where its workers must ask for their ranks", "invalid")
            settings = {number: self._settings(host, number, met["controller"], None, met["address"])}
            remote.start(settings, self._call, self._mailbox, self._environment, self._directory, self._program)
        except (CollectiveError, ValueError, OSError) as error:  # not ours: the job has ended meanwhile, and its server is closed
            self._could_not_start(number, error)

    def _settings(self, host: Host, number: int, server: str, path: Sequence[str] | None, address: str = "") -> bytes:
        """``server``: this machine's address for the host, ``address``: the host's own, where it is known."""
        name = f"[{server}]" if ":" in server else server
        variables = {
            launchers.ELASTIC_SERVER: f"{name}:{self._server.port}",
            worker.NUMBER: str(number),
            "COLLECTIVE_SECRET": self._secret,
            "COLLECTIVE_START_TIMEOUT": self._environment.get("COLLECTIVE_START_TIMEOUT", str(MEETING)),
        }
        return rank_settings(variables, path, min(host.slots, self._limits.most), address)

    def _could_not_start(self, number: int, error: Exception) -> None:
        self._mailbox.put(Frame("lost", number, str(error).encode()))
        self._mailbox.put(frames.exit_of(number, LOST))

    def _settle(self) -> None:
        assigned, overdue = self._server.settle()
        if assigned:
            self._formed += 1
            if self._limits.resets is not None and self._formed - 1 > self._limits.resets:
                raise CollectiveError(f"the ranks of the job have changed more than {self._limits.resets} times (reset-limit)", "closed")
            self._by_rank = [each.worker for each in assigned]
            self._rank_of.update({each.worker: each.rank for each in assigned})
            self._reasons.clear()
            self._told.clear()
        for number in overdue:
            group = self._groups.get(number)
            if group is not None:
                threading.Thread(target=group.kill, daemon=True).start()
