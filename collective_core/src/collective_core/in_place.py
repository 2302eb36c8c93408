"""Allreduces of an array into itself that are called again and again: prepared once, so that a small one costs little Python."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any, Callable, Tuple

from collective_core import _native, context

#: What was prepared for an array: reduction and element type; the library's call and its argument; and what must live as long.
Prepared = Tuple[str, Any, Callable[[Any], int], ctypes.c_void_p, Any]
#: By the array's id. The arrays' memory stays where it is: NumPy resizes none that has a weak reference.
prepared: dict[int, Prepared] = {}


def remember(array: Any, op: str, operation: _native.Operation) -> None:
    """Keeps the operation in :data:`prepared`, for as long as the array lives."""
    key = id(array)  # no other array's while this one lives, and forgotten before it can be
    gone = weakref.ref(array, lambda _: prepared.pop(key, None))
    # A call without declared types, and an argument that needs no conversion: half the cost of the ordinary call.
    prepared[key] = (op, array.dtype, _native.plain_run(), ctypes.c_void_p(ctypes.addressof(operation)), (gone, operation))


def fail(fault: int, array: Any) -> None:
    """Raises what a prepared call has returned."""
    try:
        _native.check(fault)
    except BaseException as error:
        context.note_failure(error, array)
        raise
