"""Life of a process in a job, from joining to leaving it: ``init``, ``shutdown``, the end of the process, and elastic jobs in between."""

from __future__ import annotations

import atexit
import math
import os
import sys
import warnings
from importlib import import_module
from typing import Any, Sequence

from collective_core import _native, arrays
from collective_core.errors import CollectiveError
from collective_core.observe import clocks, timeline
from collective_core.runtime import config, external, launchers, membership, process_sets, rendezvous

#: Generations of an elastic job in which this process tries to meet the others before it gives up.
MAX_MEETINGS = 20
#: Seconds that the end of a process waits for the other ranks to end, too, for what they do together then. A program that ends alone,
#: with sys.exit(1), say, looks no different from here.
EXIT_PATIENCE = 300.0
#: The same after a rank did not come in time, which no longer matters to the program: it may come yet, or stand still for good.
STALLED_PATIENCE = 30.0

_launcher: Any | None = None
_pid = 0  # the process that met the others: not a child that was forked from it
_lost: tuple[int, ...] = ()  # ranks that are to blame for the end of the last generation


def init(comm: Any | None = None, process_sets: Any | None = None) -> None:
    """Joins the job that this process was started in. Collective; a second call does nothing.

    ``comm``: an mpi4py communicator, or a list of ranks of ``COMM_WORLD``, that is the whole job. ``process_sets``: a list of
    ProcessSet to add at once, or "dynamic", which is always allowed here. Raises :class:`CollectiveError` naming the rank and the
    reason on every rank that can be told, and ValueError for impossible process sets; then nothing has been joined.
    """
    refuse_forked()
    _join_or_give_up(comm, process_sets)


def join_launcher(launcher: Any, timeout: float) -> None:
    """Joins the ranks of this launcher as ``init`` does those that it finds. ``timeout``: seconds, as COLLECTIVE_TIMEOUT."""
    refuse_forked()
    _join_or_give_up(None, None, launcher, timeout)


def _join_or_give_up(*how: Any) -> None:
    try:
        _join(*how)
    except Exception:
        raise
    except BaseException:  # Ctrl-C: the others must not wait for this rank, neither now nor at its end
        _give_up()
        raise


def _give_up() -> None:
    membership.give_up()
    _leave(together=False)
    _forget_launcher()


def _join(comm: Any | None, sets: Any | None, launcher: Any | None = None, timeout: float | None = None) -> None:
    global _launcher
    with membership.lock:
        if membership.is_initialized():
            return
        comm = None if isinstance(comm, (list, tuple)) and not comm else comm  # Horovod's way to say all ranks
        settings = config.from_environment()
        settings = settings if timeout is None else settings._replace(timeout=timeout)
        if launcher is not None:
            _register()
            peers = _meet(launcher, settings)
        elif launchers.is_elastic() and comm is None:
            peers = _meet_elastic(settings)
        else:
            if _launcher is None or comm is not None:
                _launcher = launchers.find_launcher(comm, settings)
                _register()
            peers = _meet(_launcher, settings)
        met: Any = launcher or _launcher
        membership.begin(met.rank, peers, settings, met.secret)
    try:
        process_sets.begin([] if sets is None or isinstance(sets, str) else sets, comm)
    except ValueError:  # on all ranks: they can call it again, with other sets
        shutdown()
        raise
    clocks.begin()
    if settings.metrics_port is not None:
        import_module("collective_core.observe.prometheus").begin(settings)
    if settings.timeline:
        timeline.start_timeline(settings.timeline)
        arrays.barrier("timeline")  # in which all ranks see that all have started it


def _register() -> None:
    global _pid
    if _pid == 0:
        atexit.register(_at_exit)
    _pid = os.getpid()


def _meet(launcher: Any, settings: config.Config) -> list[_native.PeerInfo]:
    _prepare_recorder(settings, launcher.rank)
    return rendezvous.meet(launcher, settings)


def _meet_elastic(settings: config.Config) -> list[_native.PeerInfo]:
    """Asks for a rank and meets the others of its generation; another one, where some of them have died meanwhile."""
    global _launcher
    lost = _lost
    for attempt in range(1, MAX_MEETINGS + 1):
        import_module("collective_core.elastic.worker").join(settings.start_timeout, lost)
        try:
            _launcher = launchers.find_launcher(None, settings)
            _register()
            return _meet(_launcher, settings)
        except CollectiveError as error:
            _forget_launcher()
            if attempt == MAX_MEETINGS:
                raise
            lost = error.ranks
    raise AssertionError("unreachable")


def _forget_launcher() -> None:
    global _launcher
    if _launcher is not None:
        _launcher.finish(0.0)
        _launcher = None


def refuse_forked() -> None:
    """Raises :class:`CollectiveError` in a process that was forked from a rank, whose connections it must not use."""
    if _pid not in (0, os.getpid()):
        text = "this process was forked from a rank and is not one itself; start processes with spawn or forkserver"
        raise CollectiveError(text, "closed")


def _prepare_recorder(settings: config.Config, rank: int) -> None:
    if rank == 0:
        for note in settings.notes:
            warnings.warn(note, stacklevel=3)
    path = None
    if settings.flight_recorder:
        path = import_module("collective_core.observe.flight_recorder").path_of(settings.flight_recorder, rank, launchers.generation)
        try:
            os.makedirs(settings.flight_recorder, exist_ok=True)
        except OSError as error:
            raise CollectiveError(f"COLLECTIVE_FLIGHT_RECORDER={settings.flight_recorder}: {error.strerror}", "invalid") from error
    _native.record_to(path)


def rejoin(lost: Sequence[int] = ()) -> None:
    """Leaves the job's present ranks and joins its next ones, in an elastic job. ``lost``: ranks that failed, for those who decide.

    Raises :class:`CollectiveError` as ``init`` does, of kind ``closed`` when the job is over.
    """
    global _lost
    membership.note_reset()
    _leave(together=False)
    _forget_launcher()
    _lost = tuple(lost)
    init()


def shutdown() -> None:
    """Leaves the job. Operations that are still queued fail; peers that wait for this rank are told. Not collective.

    Waits for the checkpoint that this process is writing; raises :class:`CollectiveError` (kind ``invalid``) if it could not be written.
    """
    # Between a failure and the others' learning of it there must be nothing that waits for them.
    _leave(together=membership.is_healthy() and sys.exc_info()[0] is None and not _native.in_handler())
    for finish in membership.before_end:
        finish()


def _leave(together: bool, patience: float = math.inf) -> None:
    if not membership.is_initialized():
        return
    if _pid != os.getpid():
        membership.end()
        return
    for told in membership.before_leaving:
        told(together)
    if together and not timeline.end_with_engine(patience):
        membership.give_up()
    with membership.lock:
        process_sets.end()
        _native.close()
        membership.end()
    timeline.keep()


def _at_exit() -> None:
    # A forked child (a data loader) inherits this handler, but it is not a rank.
    if _pid != os.getpid():
        return
    # After an uncaught exception mpirun must learn of it now, and end the other ranks, not when they are done.
    crashed = hasattr(sys, "last_value")
    _leave(together=membership.is_healthy() and not crashed, patience=EXIT_PATIENCE)
    for finish in membership.before_end:
        try:
            finish()
        except CollectiveError as error:  # nobody is left who could catch it
            print(f"collective_core: {error}", file=sys.stderr, flush=True)
    if _launcher is None:  # it has left an elastic job, or was told who the others are (join_launcher)
        return
    may_come = membership.are_all_live() and not external.is_chosen()
    patience = math.inf if membership.is_healthy() else STALLED_PATIENCE if may_come else 0.0
    _launcher.finish(0.0 if crashed else patience)
