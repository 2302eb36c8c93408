"""Operations of the engine: run or waited for, with a note of the failures that end it, and what they have received."""

from __future__ import annotations

import contextlib
import ctypes
import math
import threading
import weakref
from typing import Any, Callable, Iterator

import numpy as np

from collective_core import _native
from collective_core.errors import CollectiveError
from collective_core.runtime import membership

#: Of a thread in which no handler of a signal can run: what is asked whether its wait is to end.
_watched = threading.local()
#: Memory of operations that nobody waits for any more, and that the engine may still use.
_given_up: list[Any] = []


@contextlib.contextmanager
def watched(is_interrupted: Callable[[], bool], way: int | None = None) -> Iterator[None]:
    """Lets this thread's waits for operations end with KeyboardInterrupt when ``is_interrupted``, which is asked several times a second.

    ``way``: of ``_native.submit``; that of the ``watched`` around this one where it is None.
    """
    before = vars(_watched).copy()
    _watched.is_interrupted = is_interrupted
    _watched.way = getattr(_watched, "way", _native.QUEUED) if way is None else way
    try:
        yield
    finally:
        vars(_watched).clear()
        vars(_watched).update(before)


def _submit_and_wait(operation: _native.Operation, memory: Any) -> int:
    """The handle of a collective that is done."""
    is_interrupted = getattr(_watched, "is_interrupted", None)
    way, interval = (_native.BLOCKING, math.inf) if is_interrupted is None else (_watched.way, _native.SIGNAL_INTERVAL)
    handle = _native.submit(operation, way)
    while not wait(handle, (operation, memory), interval):
        if is_interrupted is not None and is_interrupted():
            _given_up.append((operation, memory))
            membership.give_up()
            raise KeyboardInterrupt
    return handle


def run(operation: _native.Operation, *memory: Any) -> None:
    """Runs a collective, which reads and writes ``memory``; remembers a failure that ended the engine."""
    if hasattr(_watched, "is_interrupted"):
        _native.release(_submit_and_wait(operation, memory))
        return
    try:
        _native.run(operation)
    except BaseException as error:
        membership.note_failure(error, (operation, memory))
        raise


def start(operation: _native.Operation, blocking: bool, *memory: Any) -> int:
    """The handle of a collective that was started; 0 where it was ``blocking`` and is done, as by :func:`run`."""
    if blocking:
        run(operation, *memory)
        return 0
    return _native.submit(operation)


def check_prepared(fault: int, memory: Any) -> None:
    """Raises what ``_native.run_prepared`` has returned as :func:`run` does."""
    try:
        _native.check(fault)
    except BaseException as error:
        membership.note_failure(error, memory)
        raise


def wait(handle: int, memory: Any = None, seconds: float = math.inf) -> bool:
    """Waits for a submitted collective, at most so long, and says whether it is done; if it failed, releases its handle and raises.

    An interruption of the wait (Ctrl-C) is not a failure: the engine goes on using the operation's ``memory``.
    """
    try:
        return _native.wait(handle, seconds)
    except BaseException as error:
        if not isinstance(error, CollectiveError) and not _native.has_ended_engine(error):
            raise
        membership.note_failure(error, memory)
        if _native.is_done(handle):  # not where a signal's handler was refused to wait
            _native.release(handle)
        raise


def take_received(handle: int, size: int) -> tuple[np.ndarray[Any, Any], list[int]]:
    """The bytes of a finished allgather or alltoall as uint8, without a copy, and the rows of each rank. Ends the handle."""
    address, length, rows = _native.gathered(handle, size)
    if length == 0:
        _native.release(handle)
        return np.empty(0, dtype=np.uint8), rows
    memory = (ctypes.c_ubyte * length).from_address(address)
    # The array keeps `memory` alive; when both are gone, the engine's buffer goes too.
    weakref.finalize(memory, _native.release, handle).atexit = False
    return np.frombuffer(memory, dtype=np.uint8), rows  # type: ignore[call-overload]


def gather(operation: _native.Operation, source: Any, size: int) -> tuple[np.ndarray[Any, Any], list[int]]:
    """Runs an allgather or alltoall of ``source`` in a set of ``size`` ranks; what :func:`take_received` gives."""
    return take_received(_submit_and_wait(operation, source), size)
