"""Arrays in the engine's own memory, which the ranks of a host reduce where they lie: nothing is copied."""

from __future__ import annotations

import ctypes
import math
import weakref
from typing import Any, Sequence

import numpy as np

from collective_core import _native, context


def empty(shape: int | Sequence[int], dtype: Any = np.float32, large_pages: bool = False) -> np.ndarray[Any, Any]:
    """An uninitialised array that collectives reduce fastest, in place: ``cc.allreduce(a, out=a)``; so do contiguous views of it.

    Not collective: every rank allocates for itself, and the array stays valid after ``shutdown``. Its memory starts on a page
    and is given back with the last view. Like all memory of the engine it does not exist in forked children.
    ``large_pages``: for large arrays that will be filled, brings all of it into memory at once, in large pages where the system has them.
    Raises :class:`CollectiveError` before ``init``, and when the host's memory is not large enough.
    """
    context.current()
    kind = np.dtype(dtype)
    dimensions = (shape,) if isinstance(shape, int) else tuple(shape)
    length = math.prod(dimensions) * kind.itemsize
    if length == 0:
        return np.empty(dimensions, kind)
    address = _native.allocate(length, large_pages)
    memory = (ctypes.c_ubyte * length).from_address(address)
    # The array keeps `memory` alive; when both are gone, the block goes back.
    weakref.finalize(memory, _native.free, address).atexit = False
    return np.frombuffer(memory, dtype=kind).reshape(dimensions)  # type: ignore[call-overload,no-any-return,unused-ignore]
