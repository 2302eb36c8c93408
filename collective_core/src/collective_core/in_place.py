"""Allreduces of an array into itself that are called again and again: prepared once, so that a small one costs little Python."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any, Callable, Tuple

from collective_core import _native, context
from collective_core.errors import CollectiveError

#: By the array's id: the array, what was prepared for it (reduction, shape, type), the library's call and its argument.
Prepared = Tuple[Any, str, Any, Any, Callable[[Any], int], ctypes.c_void_p, _native.Operation]
_prepared: dict[int, Prepared] = {}


def remember(array: Any, op: str, operation: _native.Operation) -> None:
    """Keeps the operation for :func:`repeat`, for as long as the array lives."""
    key = id(array)  # no other array's while this one lives, and forgotten before it can be
    gone = weakref.ref(array, lambda _: _prepared.pop(key, None))
    # A call without declared types, and an argument that needs no conversion: half the cost of the ordinary call.
    _prepared[key] = (gone, op, array.shape, array.dtype, _native.plain_run(), ctypes.c_void_p(ctypes.addressof(operation)), operation)


def repeat(array: Any, op: str) -> bool:
    """Runs the remembered operation, if there is one and the array is still what it was; says whether it ran."""
    known = _prepared.get(id(array))
    if known is None:
        return False
    _, kept_op, shape, dtype, call, argument, _ = known
    if op != kept_op or array.shape != shape or array.dtype is not dtype:
        return False
    fault = call(argument)
    if fault:
        try:
            _native.check(fault)
        except CollectiveError as error:
            context.note_failure(error, array)
            raise
    return True
