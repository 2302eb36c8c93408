"""Operations under way: what ``poll`` and ``synchronize`` know of a handle."""

from __future__ import annotations

import itertools
from typing import Any, Callable, Sequence

from collective_core import _native, arrays
from collective_core.errors import CollectiveError


class Work:
    """A collective that was started, the tensors that it needs, and what makes its result."""

    __slots__ = ("_engine_handle", "_finish", "_keep", "_keeps_handle")

    def __init__(self, engine_handle: int, finish: Callable[[], Any], keep: Any = None, keeps_handle: bool = False) -> None:
        self._engine_handle = engine_handle  # 0: it is done already
        self._finish = finish
        self._keep = keep
        self._keeps_handle = keeps_handle  # the result lies in the engine's memory and ends the handle itself

    def is_done(self) -> bool:
        return not self._engine_handle or _native.is_done(self._engine_handle)

    def result(self) -> Any:
        """Waits. Raises :class:`CollectiveError` if the collective failed. To be called once."""
        if self._engine_handle:
            arrays.wait(self._engine_handle)
        result = self._finish()
        if self._engine_handle and not self._keeps_handle:
            _native.release(self._engine_handle)
        return result


class Group:
    """Several collectives with one handle; the result is the list of theirs."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def is_done(self) -> bool:
        return all(work.is_done() for work in self._works)

    def result(self) -> list[Any]:
        """Waits for all, and raises the first error only when no operation uses the tensors any more."""
        results: list[Any] = []
        error: CollectiveError | None = None
        for work in self._works:
            try:
                results.append(work.result())
            except CollectiveError as failure:
                error = error or failure
        if error is not None:
            raise error
        return results


class First:
    """Work whose result is the first part of another's."""

    def __init__(self, work: Work) -> None:
        self.is_done = work.is_done
        self._work = work

    def result(self) -> Any:
        return self._work.result()[0]


_numbers = itertools.count(1)
_under_way: dict[int, Any] = {}


def handle_of(work: Any) -> int:
    """A handle for something with ``is_done`` and ``result``."""
    number = next(_numbers)
    _under_way[number] = work
    return number


def poll(handle: int) -> bool:
    """Whether the operation is done, so that :func:`synchronize` will not wait."""
    if handle not in _under_way:
        raise CollectiveError(f"handle {handle} is unknown or has been synchronized already", "invalid")
    return bool(_under_way[handle].is_done())


def synchronize(handle: int) -> Any:
    """Waits for the operation and returns its result: what the blocking form returns, for a group a list.

    Raises :class:`CollectiveError` if it failed.
    """
    work = _under_way.pop(handle, None)
    if work is None:
        raise CollectiveError(f"handle {handle} is unknown or has been synchronized already", "invalid")
    return work.result()
