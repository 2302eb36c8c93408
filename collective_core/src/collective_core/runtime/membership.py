"""The process's membership in a job: who is where, what has failed, and how unnamed operations are called. One per process.

It is the state that everything above reads. A process joins and leaves in job.py.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any, Callable, Iterator, NamedTuple

from collective_core import _native
from collective_core.errors import CollectiveError, NotInitialisedError, is_fatal
from collective_core.runtime import external, prepared
from collective_core.runtime.config import Config


class Membership(NamedTuple):
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    peers: list[_native.PeerInfo]
    config: Config


#: Called when a failure has ended the engine, from any thread, perhaps more than once.
after_failure: list[Callable[[], None]] = []
#: Called before the process leaves the job's ranks, while messages still go; whether it does so in good order.
before_leaving: list[Callable[[bool], None]] = []
#: Called when the process leaves the job for good, after its engine's end: what it still does for the job alone. May raise CollectiveError.
before_end: list[Callable[[], None]] = []
#: Held while the process joins or leaves. A signal may arrive meanwhile, and its handler call shutdown().
lock = threading.RLock()

_membership: Membership | None = None
_secret = b""
_healthy = True
_all_live = True  # as far as failures tell
_failure: BaseException | None = None  # that ended the engine: an error of its own, or what a signal's handler raised in a wait
_generation = 0
_resets = 0
_joins: dict[int, int] = {}
_rounds: dict[int, int] = {}  # as _joins, since the process has joined the job: the same on ranks that came later
_changes = 0
_counters: dict[tuple[str, int], Iterator[int]] = {}


def begin(rank: int, peers: list[_native.PeerInfo], settings: Config, secret: bytes) -> None:
    """The process has met ``peers``, of which none has failed. ``secret``: that the launcher's ranks share."""
    global _membership, _secret, _generation, _changes, _healthy, _all_live, _failure
    _counters.clear()
    _rounds.clear()
    _generation += 1
    _changes += 1
    prepared.forget_all()
    _healthy, _all_live, _failure = True, True, None
    _membership, _secret = _among(rank, peers, settings), secret


def _among(rank: int, peers: list[_native.PeerInfo], settings: Config) -> Membership:
    hosts: dict[str, list[int]] = {}
    for peer in peers:
        hosts.setdefault(peer.host_id, []).append(peer.rank)
    neighbours = hosts[peers[rank].host_id]
    local_rank = neighbours.index(rank)
    across = [ranks[local_rank] for ranks in hosts.values() if len(ranks) > local_rank]
    return Membership(rank, len(peers), local_rank, len(neighbours), across.index(rank), len(across), peers, settings)


def end() -> None:
    """The process has left."""
    global _membership, _secret
    prepared.forget_all()
    _membership, _secret = None, b""


def note_failure(error: BaseException, memory: Any = None) -> None:
    """After a failure that ended the engine, the end of the process must not wait for the other ranks.

    ``memory``: what the operation that failed reads and writes, which MPI may still do.
    """
    global _healthy, _all_live, _failure
    interrupted = _native.has_ended_engine(error)  # whatever the handler has raised, perhaps an error of ours
    own = error if isinstance(error, CollectiveError) and not interrupted else None
    if interrupted or (own is not None and is_fatal(own)):
        _healthy, _all_live = False, _all_live and own is not None and own.kind == "timeout"
        _failure = _failure or error
        external.keep(memory)
        for told in after_failure:
            told()


def give_up() -> None:
    """From now on nothing waits for the other ranks, neither the process's leaving nor its end."""
    global _healthy, _all_live
    _healthy = _all_live = False


def is_healthy() -> bool:
    """Whether no failure has ended the engine."""
    return _healthy


def are_all_live() -> bool:
    """Whether the other ranks may still come: no failure was more than a timeout."""
    return _all_live


def failure() -> BaseException | None:
    """What has ended the engine, if anything has."""
    return _failure


def current() -> Membership:
    if _membership is None:
        raise NotInitialisedError("the engine is not initialised: call init() first", "closed")
    return _membership


def generation() -> int:
    """A number that changes whenever this process has joined other ranks."""
    return _generation


def note_reset() -> None:
    """The process leaves its ranks for new ones, in an elastic job."""
    global _resets
    _resets += 1


def resets() -> int:
    """How often it has done so."""
    return _resets


def job_secret() -> bytes:
    """The secret that the launcher's ranks share; empty if there is none."""
    return _secret


def next_name(kind: str, process_set: int = 0) -> str:
    """The name of an unnamed operation: the same on all ranks of the process set that call the same operations."""
    return name_prefix(kind, process_set) + str(next(counter(kind, process_set)))


def name_prefix(kind: str, process_set: int = 0) -> str:
    """What precedes the number in :func:`next_name`: another prefix after each join, as results from before may not be collected yet."""
    rounds = _rounds.get(process_set, 0)
    return f"{kind}.noname.{rounds}." if rounds else f"{kind}.noname."


def counter(kind: str, process_set: int = 0) -> Iterator[int]:
    """The numbers of :func:`next_name`, until the next of :func:`changes`. One ``next`` is not interrupted by other threads."""
    key = (kind, process_set)
    known = _counters.get(key)
    if known is None:
        with lock:
            known = _counters.setdefault(key, itertools.count(1))
    return known


def forget_names(process_set: int) -> None:
    """Starts the numbers of unnamed operations again, where all ranks are at the same point."""
    global _changes
    with lock:
        for key in [key for key in _counters if key[1] == process_set]:
            del _counters[key]
        for counts in (_joins, _rounds):
            counts[process_set] = counts.get(process_set, 0) + 1
        _changes += 1
        prepared.forget_all()


def note_process_sets() -> None:
    """There is another process set, or one fewer: names and joins are counted by their numbers."""
    global _changes
    with lock:
        _changes += 1
        prepared.forget_all()


def joins(process_set: int) -> int:
    """How often all ranks of the set have joined: before that, they may have done different numbers of steps."""
    return _joins.get(process_set, 0)


def changes() -> int:
    """A number that changes whenever :func:`generation`, the process sets or any :func:`joins` do."""
    return _changes


def is_initialized() -> bool:
    """Whether this process has joined a job."""
    return _membership is not None


def rank() -> int:
    """This process's number in the job, 0 to size - 1."""
    return current().rank


def size() -> int:
    """Processes in the job."""
    return current().size


def local_rank() -> int:
    """This process's number on its host, 0 to local_size - 1."""
    return current().local_rank


def local_size() -> int:
    """Processes on this host."""
    return current().local_size


def cross_rank() -> int:
    """This host's number among the hosts that have a process with this local rank."""
    return current().cross_rank


def cross_size() -> int:
    """Hosts that have a process with this local rank."""
    return current().cross_size


def is_homogeneous() -> bool:
    """Whether all hosts have the same number of processes."""
    counts: dict[str, int] = {}
    for peer in current().peers:
        counts[peer.host_id] = counts.get(peer.host_id, 0) + 1
    return len(set(counts.values())) == 1
