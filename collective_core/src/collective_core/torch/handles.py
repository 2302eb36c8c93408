"""Operations under way: what ``poll`` and ``synchronize`` know of a handle."""

from __future__ import annotations

import itertools
from collections import deque
from functools import partial
from typing import Any, Callable, Sequence

import torch

from collective_core import _native
from collective_core.errors import CollectiveError, InvalidUseError
from collective_core.runtime import cores, membership, operations
from collective_core.torch.compiling import not_compiled

#: What operations read and write, by the engine's handle. The engine has only addresses: the memory stays until the engine is
#: done with it, whether or not anybody still waits.
_kept: dict[int, Any] = {}
#: Handles of the engine for which nobody will wait any more.
_abandoned: deque[int] = deque()


def can_overlap() -> bool:
    """Whether sums beside the backward pass can save time: not where all cores compute and there is no network to wait for.

    Two threads of a rank would only take the core from each other, and those of other ranks wait for both.
    """
    member = membership.current()
    return member.cross_size > 1 or torch.get_num_threads() < cores.share(member.local_size, cores.launcher())


def _drop_abandoned() -> None:
    """Lets go of what abandoned operations used, where the engine is done with it."""
    for _ in range(len(_abandoned)):
        try:
            handle = _abandoned.popleft()
        except IndexError:
            return  # another thread was faster
        try:
            over = operations.wait(handle, _kept.get(handle), 0.0)
        except CollectiveError:  # its own, or that the engine was shut down, which has ended its operations
            over = True
        if over:
            _kept.pop(handle, None)
            _native.release(handle)
        else:
            _abandoned.append(handle)


def _wait(handle: int) -> None:
    try:
        operations.wait(handle, _kept.get(handle))
    except CollectiveError:
        if not _native.in_handler():  # where nothing can be waited for, and the operation goes on
            _kept.pop(handle, None)
        raise


class Work:
    """A collective that was started, the tensors that it needs, and what makes its result."""

    __slots__ = ("_engine_handle", "_finish", "_keeps_handle")

    def __init__(self, engine_handle: int, finish: Callable[[], Any], keep: Any = None, keeps_handle: bool = False) -> None:
        self._engine_handle = engine_handle  # 0: it is done already
        self._finish = finish
        self._keeps_handle = keeps_handle  # the result lies in the engine's memory and ends the handle itself
        if _abandoned:
            _drop_abandoned()
        if engine_handle:
            _kept[engine_handle] = keep

    def __del__(self) -> None:
        # One that was never begun has no handle; at the end of the interpreter, after an error, there is nothing kept.
        if _kept and getattr(self, "_engine_handle", 0) in _kept:
            _abandoned.append(self._engine_handle)

    def is_done(self) -> bool:
        return not self._engine_handle or _native.is_done(self._engine_handle)

    def result(self) -> Any:
        """Waits. Raises :class:`CollectiveError` if the collective failed. To be called once."""
        if self._engine_handle:
            _wait(self._engine_handle)
        result = self._finish()
        _kept.pop(self._engine_handle, None)
        if self._engine_handle and not self._keeps_handle:
            _native.release(self._engine_handle)
        return result


def results_of(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Makes all calls, and raises the first exception among theirs only after the last call. An interruption ends it at once."""
    results: list[Any] = []
    error: Exception | None = None
    for call in calls:
        try:
            results.append(call())
        except Exception as failure:  # noqa: BLE001 - raised below
            error = error or failure
    if error is not None:
        raise error
    return results


def finish() -> None:
    """Waits for all that is under way, and raises the first failure of it; results are still to be synchronised."""
    results_of([partial(_wait, handle) for handle in list(_kept) if handle not in _abandoned])


def forget_all() -> None:
    """After the end of the engine that had them: it uses no memory any more, and the next one does not know them."""
    for handle in list(_kept):
        _native.release(handle)
    _kept.clear()
    _under_way.clear()
    _abandoned.clear()


class Group:
    """Several collectives with one handle; the result is the list of theirs."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def is_done(self) -> bool:
        return all(work.is_done() for work in self._works)

    def result(self) -> list[Any]:
        """Waits for all, and raises the first error only when no operation uses the tensors any more."""
        return results_of([work.result for work in self._works])


class Mapped:
    """Work whose result is made of another's."""

    def __init__(self, work: Any, make: Callable[[Any], Any]) -> None:
        self.is_done = work.is_done
        self._work = work
        self._make = make

    def result(self) -> Any:
        return self._make(self._work.result())


_numbers = itertools.count(1)
_under_way: dict[int, Any] = {}


def handle_of(work: Any) -> int:
    """A handle for something with ``is_done`` and ``result``."""
    number = next(_numbers)
    _under_way[number] = work
    return number


def abandon(handle: int) -> None:
    """Forgets a handle without waiting for its operation, whose memory must not be used again."""
    _under_way.pop(handle, None)


@not_compiled
def poll(handle: int) -> bool:
    """Whether the operation is done, so that :func:`synchronize` will not wait."""
    if handle not in _under_way:
        raise InvalidUseError(f"handle {handle} is unknown or has been synchronized already", "invalid")
    return bool(_under_way[handle].is_done())


@not_compiled
def synchronize(handle: int) -> Any:
    """Waits for the operation and returns its result: what the blocking form returns, for a group a list.

    Raises :class:`CollectiveError` if it failed. A handle that has been synchronized already gives None, as in Horovod.
    """
    work = _under_way.get(handle)
    if work is None:
        return None
    if _native.in_handler() and not work.is_done():  # before a part of it is taken, which can be done only once
        _native.refuse_in_handler()
    del _under_way[handle]
    return work.result()
