"""Calls that a program repeats on the same array or tensor, in place: from the third on, they cost little Python.

A function that can be prepared has a :func:`front`, or first asks ``_native.run_prepared``. Where that knows no such call, it runs the
operation itself and then tells :func:`note` of it.
"""

from __future__ import annotations

import re
import sys
import warnings
import weakref
from typing import Any, Callable, Iterator, Sequence, TypeVar, cast

from collective_core import _native
from collective_core.errors import CollectiveError

F = TypeVar("F", bound=Callable[..., Any])

#: Objects that are remembered after one call: preparing costs several times what it saves at the next.
MAX_SEEN = 4096

#: The interpreter's lock guards what is prepared; there are interpreters without.
_is_guarded = bool(getattr(sys, "_is_gil_enabled", lambda: True)())

#: By the object's id: what forgets the call before another object can have that id.
_references: dict[int, Any] = {}
#: The objects' latest calls: another object may have the id by now.
_seen: dict[int, tuple[weakref.ref[Any], Sequence[Any]]] = {}


def note(
    what: Any,
    arguments: Sequence[Any],
    operation: _native.Operation,
    counter: Iterator[int] | None = None,
    exchange: int = 0,
    by_front: bool = False,
) -> None:
    """The operation has run well for a call with these arguments; at the second time in a row it is prepared (:func:`_native.prepare`).

    ``by_front``: for the call of :func:`front` that has come here.
    """
    key = id(what)
    if not _is_guarded:
        return
    seen, latest = _seen.get(key, (None, ()))
    if seen is None or seen() is not what or latest != arguments:
        if len(_seen) >= MAX_SEEN:
            _seen.clear()
        _seen[key] = weakref.ref(what), arguments
        return
    reference = _references[key] = weakref.ref(what, lambda _: _forget(key))
    _native.prepare(what, None if by_front else arguments, operation, counter, exchange)
    if _references.get(key) is not reference:  # another thread has had all forgotten meanwhile
        _native.forget_prepared(key)


def is_noted(what: Any) -> bool:
    """Whether there may be a prepared call of it."""
    return id(what) in _references


def front(function: F, changed: Callable[[tuple[Any]], Any], failed: Callable[[int, Any], Any]) -> F:
    """The function as a built-in one that runs prepared calls itself (:func:`_native.front`), or as it is where there can be none."""
    if not _is_guarded or sys.version_info < (3, 9):
        return function
    # It would tell the program to ask PyTorch's developers for that; the compiler calls it as it is, between what it compiles.
    warnings.filterwarnings("ignore", rf"Dynamo does not know how to trace the builtin `{re.escape(function.__module__)}\.")
    try:
        return cast(F, _native.front(function, changed, failed))
    except CollectiveError:  # the library cannot be opened, which init() will say
        return function


def _forget(key: int) -> None:
    _native.forget_prepared(key)
    _references.pop(key, None)
    _seen.pop(key, None)


def forget_all() -> None:
    """Calls are prepared anew: the ranks, the process sets or the numbers of unnamed operations have changed."""
    kept = list(_references.values())  # whose objects may end before the engine has forgotten them
    _references.clear()
    _seen.clear()
    _native.forget_prepared()
    kept.clear()
