"""Calls that a program repeats on the same array or tensor, in place: from the third on, they cost little Python.

A function that can be prepared first asks ``_native.run_prepared``. Where that knows no such call, it runs the operation itself and then
tells :func:`note` of it.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any, Iterator, Sequence

from collective_core import _native

#: Objects that are remembered after one call: preparing costs several times what it saves at the next.
MAX_SEEN = 4096

#: The interpreter's lock guards what is prepared; there are interpreters without.
_is_guarded = bool(getattr(sys, "_is_gil_enabled", lambda: True)())

#: By the object's id: what forgets the call before another object can have that id.
_references: dict[int, Any] = {}
_seen: set[int] = set()


def note(
    what: Any, arguments: Sequence[Any], operation: _native.Operation, counter: Iterator[int] | None = None, exchange: int = 0
) -> None:
    """The operation has run well for a call with these arguments; at the second time it is prepared (as :func:`_native.prepare` says)."""
    key = id(what)
    if not _is_guarded:
        return
    if key not in _seen:
        if len(_seen) >= MAX_SEEN:
            _seen.clear()
        _seen.add(key)
        return
    reference = _references[key] = weakref.ref(what, lambda _: _forget(key))
    _native.prepare(what, arguments, operation, counter, exchange)
    if _references.get(key) is not reference:  # another thread has had all forgotten meanwhile
        _native.forget_prepared(key)


def is_noted(what: Any) -> bool:
    """Whether there may be a prepared call of it."""
    return id(what) in _references


def _forget(key: int) -> None:
    _native.forget_prepared(key)
    _references.pop(key, None)
    _seen.discard(key)


def forget_all() -> None:
    """Calls are prepared anew: the ranks, the process sets or the numbers of unnamed operations have changed."""
    kept = list(_references.values())  # whose objects may end before the engine has forgotten them
    _references.clear()
    _seen.clear()
    _native.forget_prepared()
    kept.clear()
