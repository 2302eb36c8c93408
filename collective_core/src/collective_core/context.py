"""The process's membership in a job: init, shutdown, and who is where. One per process."""

from __future__ import annotations

import atexit
import math
import os
import sys
import threading
import warnings
from typing import Any, Callable, NamedTuple, Sequence

from collective_core import _native
from collective_core.elastic import worker
from collective_core.errors import CollectiveError, NotInitialisedError, is_fatal
from collective_core.runtime import config, launchers, rendezvous
from collective_core.transport import mpi

#: Generations of an elastic job in which this process tries to meet the others before it gives up.
MOST_MEETINGS = 20
#: Seconds that the end of a process waits for the other ranks to end, too, for what they do together then. A program that ends alone,
#: with sys.exit(1), say, looks no different from here.
EXIT_PATIENCE = 300.0
#: The same after a rank did not come in time, which no longer matters to the program: it may come yet, or stand still for good.
STALLED_PATIENCE = 30.0


class Membership(NamedTuple):
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    peers: list[_native.PeerInfo]
    config: config.Config


#: Called when a failure has ended the engine, from any thread, perhaps more than once.
after_failure: list[Callable[[], None]] = []

_lock = threading.RLock()  # a signal may arrive while it is held, and its handler call shutdown()
_membership: Membership | None = None
_launcher: Any | None = None
_pid = 0  # the process that met the others: not a child that was forked from it
_healthy = True
_all_live = True  # as far as failures tell
_failure: BaseException | None = None  # that ended the engine: an error of its own, or what a signal's handler raised in a wait
_generation = 0
_joins: dict[int, int] = {}
_changes = 0
_lost: tuple[int, ...] = ()  # ranks that are to blame for the end of the last generation
_counters: dict[tuple[str, int], int] = {}


def init(comm: Any | None = None, process_sets: Any | None = None) -> None:
    """Joins the job that this process was started in. Collective; a second call does nothing.

    ``comm``: an mpi4py communicator, or a list of ranks of ``COMM_WORLD``, that is the whole job. ``process_sets``: a list of
    ProcessSet to add at once, or "dynamic", which is always allowed here. Raises :class:`CollectiveError` naming the rank and the
    reason on every rank that can be told, and ValueError for impossible process sets; then nothing has been joined.
    """
    _refuse_forked()
    try:
        _join(comm, process_sets)
    except Exception:
        raise
    except BaseException:  # Ctrl-C: the others must not wait for this rank, neither now nor at its end
        _give_up()
        raise


def _give_up() -> None:
    global _healthy, _all_live
    _healthy = _all_live = False
    _leave(together=False)
    _forget_launcher()


def _join(comm: Any | None, process_sets: Any | None) -> None:
    global _membership, _launcher, _generation, _changes, _healthy, _all_live, _failure
    with _lock:
        if _membership is not None:
            return
        comm = None if isinstance(comm, (list, tuple)) and not comm else comm  # Horovod's way to say all ranks
        settings = config.from_environment()
        if worker.is_one() and comm is None:
            peers = _meet_elastic(settings)
        else:
            if _launcher is None or comm is not None:
                _launcher = launchers.find_launcher(comm, settings)
                _register()
            peers = _meet(settings)
        _counters.clear()
        _generation += 1
        _changes += 1
        _healthy, _all_live, _failure = True, True, None  # of these ranks none has failed
        _membership = _place(_rank_of(_launcher), peers, settings)
    from collective_core import in_place  # which need a membership
    from collective_core.observe import clocks  # which need a membership
    from collective_core.runtime import process_sets as sets

    in_place.prepared.clear()  # new ranks have prepared nothing: all compare anew

    try:
        sets.begin([] if process_sets is None or isinstance(process_sets, str) else process_sets, comm)
    except ValueError:  # on all ranks: they can call it again, with other sets
        shutdown()
        raise
    clocks.begin()
    if settings.timeline:
        from collective_core import arrays  # which need a membership, too
        from collective_core.observe import timeline  # which need a membership, too

        timeline.start_timeline(settings.timeline)
        arrays.barrier("timeline")  # in which all ranks see that all have started it


def _rank_of(launcher: Any) -> int:
    rank: int = launcher.rank
    return rank


def _register() -> None:
    global _pid
    if _pid == 0:
        atexit.register(_at_exit)
    _pid = os.getpid()


def _meet(settings: config.Config) -> list[_native.PeerInfo]:
    assert _launcher is not None  # noqa: S101
    _prepare_recorder(settings, _launcher.rank)
    return rendezvous.meet(_launcher, settings)


def _meet_elastic(settings: config.Config) -> list[_native.PeerInfo]:
    """Asks for a rank and meets the others of its generation; another one, where some of them have died meanwhile."""
    global _launcher
    lost = _lost
    for attempt in range(1, MOST_MEETINGS + 1):
        worker.join(settings.start_timeout, lost)
        try:
            _launcher = launchers.find_launcher(None, settings)
            _register()
            return _meet(settings)
        except CollectiveError as error:
            _forget_launcher()
            if attempt == MOST_MEETINGS:
                raise
            lost = error.ranks
    raise AssertionError("unreachable")


def _forget_launcher() -> None:
    global _launcher
    if _launcher is not None:
        _launcher.finish(0.0)
        _launcher = None


def _refuse_forked() -> None:
    if _pid not in (0, os.getpid()):
        text = "this process was forked from a rank and is not one itself; start processes with spawn or forkserver"
        raise CollectiveError(text, "closed")


def _prepare_recorder(settings: config.Config, rank: int) -> None:
    if rank == 0:
        for note in settings.notes:
            warnings.warn(note, stacklevel=3)
    path = None
    if settings.flight_recorder:
        from collective_core.observe import flight_recorder  # which needs this module, too

        path = flight_recorder.path_of(settings.flight_recorder, rank, worker.generation())
        try:
            os.makedirs(settings.flight_recorder, exist_ok=True)
        except OSError as error:
            raise CollectiveError(f"COLLECTIVE_FLIGHT_RECORDER={settings.flight_recorder}: {error.strerror}", "invalid") from error
    _native.record_to(path)


def _place(rank: int, peers: list[_native.PeerInfo], settings: config.Config) -> Membership:
    hosts: dict[str, list[int]] = {}
    for peer in peers:
        hosts.setdefault(peer.host_id, []).append(peer.rank)
    neighbours = hosts[peers[rank].host_id]
    local_rank = neighbours.index(rank)
    across = [ranks[local_rank] for ranks in hosts.values() if len(ranks) > local_rank]
    return Membership(rank, len(peers), local_rank, len(neighbours), across.index(rank), len(across), peers, settings)


def rejoin(lost: Sequence[int] = ()) -> None:
    """Leaves the job's present ranks and joins its next ones, in an elastic job. ``lost``: ranks that failed, for those who decide.

    Raises :class:`CollectiveError` as ``init`` does, of kind ``closed`` when the job is over.
    """
    global _lost
    _leave(together=False)
    _forget_launcher()
    _lost = tuple(lost)
    init()


def generation() -> int:
    """A number that changes whenever this process has joined other ranks."""
    return _generation


def shutdown() -> None:
    """Leaves the job. Operations that are still queued fail; peers that wait for this rank are told. Not collective."""
    # Between a failure and the others' learning of it there must be nothing that waits for them.
    _leave(together=_healthy and sys.exc_info()[0] is None and not _native.in_handler())


def _leave(together: bool, patience: float = math.inf) -> None:
    global _membership, _healthy, _all_live
    if _membership is None:
        return
    if _pid != os.getpid():
        _membership = None
        return
    from collective_core.observe import timeline
    from collective_core.runtime import process_sets as sets

    if together and not timeline.end_with_engine(patience):
        _healthy = _all_live = False
    with _lock:
        sets.end()
        _native.close()
        _membership = None
    timeline.keep()


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
        mpi.keep(memory)
        for told in after_failure:
            told()


def failure() -> BaseException | None:
    """What has ended the engine, if anything has."""
    return _failure


def _at_exit() -> None:
    # A forked child (a data loader) inherits this handler, but it is not a rank.
    if _launcher is None or _pid != os.getpid():
        return
    # After an uncaught exception mpirun must learn of it now, and end the other ranks, not when they are done.
    crashed = hasattr(sys, "last_value")
    _leave(together=_healthy and not crashed, patience=EXIT_PATIENCE)
    patience = math.inf if _healthy else STALLED_PATIENCE if _all_live and not mpi.is_chosen() else 0.0
    _launcher.finish(0.0 if crashed else patience)


def current() -> Membership:
    if _membership is None:
        raise NotInitialisedError("the engine is not initialised: call init() first", "closed")
    return _membership


def job_secret() -> bytes:
    """The secret that the launcher's ranks share; empty if there is none."""
    secret: bytes = _launcher.secret if _launcher is not None else b""
    return secret


def next_name(kind: str, process_set: int = 0) -> str:
    """The name of an unnamed operation: the same on all ranks of the process set that call the same operations."""
    key = (kind, process_set)
    with _lock:
        number = _counters[key] = _counters.get(key, 0) + 1
    return f"{kind}.noname.{number}"


def forget_names(process_set: int) -> None:
    """Starts the numbers of unnamed operations again, where all ranks are at the same point."""
    global _changes
    with _lock:
        for key in [key for key in _counters if key[1] == process_set]:
            del _counters[key]
        _joins[process_set] = _joins.get(process_set, 0) + 1
        _changes += 1


def note_process_sets() -> None:
    """There is another process set, or one fewer: names and joins are counted by their numbers."""
    global _changes
    with _lock:
        _changes += 1


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
