"""The collectives on NumPy arrays. Works without PyTorch.

Every function is collective: all ranks call it, with the same name (or none), type and shape, in the same order. A
disagreement raises :class:`CollectiveError` (kind ``mismatch``) on every rank, and the engine stays usable.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from collective_core import _native, context
from collective_core.errors import CollectiveError

#: Ways to combine the ranks' values, under Horovod's names. Adasum is not in this version.
Sum, Average, Min, Max, Product = "Sum", "Average", "Min", "Max", "Product"
REDUCTIONS = {Sum: _native.SUM, Average: _native.AVERAGE, Min: _native.MIN, Max: _native.MAX, Product: _native.PRODUCT}


def reduction_number(op: Any, dtype: str, prescale: float, postscale: float) -> int:
    """The engine's number for ``op``, after checking that it makes sense for ``dtype``."""
    if op not in REDUCTIONS:
        raise CollectiveError(f"op={op!r} is not in this version; choose from {', '.join(REDUCTIONS)}", "invalid")
    floating = "float" in dtype
    if not floating and (prescale != 1.0 or postscale != 1.0):
        raise CollectiveError(f"prescale_factor and postscale_factor need a floating-point tensor, not {dtype}", "invalid")
    if dtype == "bool" and op == Average:
        raise CollectiveError("the average of booleans is not defined; cast the tensor first", "invalid")
    number: int = REDUCTIONS[op]
    return number


def run(operation: _native.Operation) -> None:
    """Runs a collective; remembers a failure that ended the engine."""
    try:
        _native.run(operation)
    except CollectiveError as error:
        context.note_failure(error)
        raise


def wait(handle: int) -> None:
    try:
        _native.wait(handle)
    except CollectiveError as error:
        context.note_failure(error)
        raise


def _contiguous(array: Any) -> tuple[np.ndarray[Any, Any], str]:
    # ascontiguousarray would turn a scalar into a vector.
    contiguous = np.asarray(array, order="C")
    dtype = contiguous.dtype.name
    if dtype not in _native.DTYPES or not contiguous.dtype.isnative:
        raise CollectiveError(f"arrays of {contiguous.dtype} cannot be sent; types: {', '.join(_native.DTYPES)}", "invalid")
    return contiguous, dtype


def _writable(out: np.ndarray[Any, Any], like: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if out.dtype != like.dtype or out.shape != like.shape or not out.flags.c_contiguous or not out.flags.writeable:
        raise CollectiveError(f"out must be a writable, contiguous array of {like.dtype}{list(like.shape)}", "invalid")
    return out


def allreduce(
    array: Any,
    name: str | None = None,
    op: str = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    out: np.ndarray[Any, Any] | None = None,
) -> np.ndarray[Any, Any]:
    """Combines the arrays of all ranks element by element, in rank order; returns a new array of the same shape, or ``out``.

    ``out``: a contiguous array of the same type and shape, which may be ``array`` itself. float16 and bfloat16 are summed in
    float32 and rounded once. The average of integers is rounded down; integers wrap on overflow as in NumPy.
    ``prescale_factor`` multiplies each input, ``postscale_factor`` the result.
    """
    context.current()
    source, dtype = _contiguous(array)
    result = np.empty_like(source) if out is None else _writable(out, source)
    number = reduction_number(op, dtype, prescale_factor, postscale_factor)
    run(
        _native.operation(
            _native.ALLREDUCE,
            name or context.next_name("allreduce"),
            dtype,
            source.shape,
            source.size,
            source.ctypes.data,
            result.ctypes.data,
            reduce=number,
            prescale=prescale_factor,
            postscale=postscale_factor,
        )
    )
    return result


def broadcast(array: Any, root_rank: int = 0, name: str | None = None) -> np.ndarray[Any, Any]:
    """The root's array on every rank, as a new array; all ranks pass one of the same type and shape."""
    context.current()
    source, dtype = _contiguous(array)
    result = source.copy()
    run(
        _native.operation(
            _native.BROADCAST,
            name or context.next_name("broadcast"),
            dtype,
            source.shape,
            source.size,
            result.ctypes.data,
            result.ctypes.data,
            root=root_rank,
        )
    )
    return result


def allgather(array: Any, name: str | None = None) -> np.ndarray[Any, Any]:
    """All ranks' arrays one after the other along the first dimension, which may differ between ranks."""
    context.current()
    source, dtype = _contiguous(array)
    handle = submit_allgather(source.ctypes.data, dtype, source.shape, source.size, name, blocking=True)
    wait_and_release_on_error(handle)
    buffer, rows = take_gathered(handle)
    result: np.ndarray[Any, Any] = buffer.view(source.dtype).reshape((sum(rows), *source.shape[1:]))
    return result


def submit_allgather(address: int, dtype: str, shape: tuple[int, ...], count: int, name: str | None, blocking: bool) -> int:
    """Starts an allgather and returns its handle."""
    if not shape:
        raise CollectiveError("allgather needs at least one dimension; reshape the scalar to (1,)", "invalid")
    chosen = name or context.next_name("allgather")
    return _native.submit(_native.operation(_native.ALLGATHER, chosen, dtype, shape, count, address), blocking)


def wait_and_release_on_error(handle: int) -> None:
    try:
        wait(handle)
    except BaseException:
        _native.release(handle)
        raise


def take_gathered(handle: int) -> tuple[np.ndarray[Any, Any], list[int]]:
    """The bytes of a finished allgather as an array of uint8, without a copy, and each rank's rows. Ends the handle."""
    import ctypes

    address, length, rows = _native.gathered(handle, context.size())
    if length == 0:
        _native.release(handle)
        return np.empty(0, dtype=np.uint8), rows
    memory = (ctypes.c_ubyte * length).from_address(address)
    # The array keeps `memory` alive; when both are gone, the engine's buffer goes too.
    weakref.finalize(memory, _native.release, handle).atexit = False
    return np.frombuffer(memory, dtype=np.uint8), rows  # type: ignore[call-overload]


def barrier(name: str | None = None) -> None:
    """Returns when every rank has called it."""
    context.current()
    run(_native.operation(_native.BARRIER, name or context.next_name("barrier"), "uint8", (), 0))
