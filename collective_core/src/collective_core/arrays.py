"""The collectives on NumPy arrays. Works without PyTorch.

Every function is collective: all ranks of the process set (by default of the job) call it, with the same name (or none), type
and shape. A disagreement raises :class:`CollectiveError` (kind ``mismatch``) on every rank, and the engine stays usable.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from typing import Any, Sequence

import numpy as np

from collective_core import _native
from collective_core.runtime import membership, operations, prepared
from collective_core.runtime.process_sets import Members, ProcessSet, members_of
from collective_core.runtime.reductions import Reduction, takes

# Ways to combine the ranks' values, under Horovod's names. Adasum is for torch tensors only.
#: The sum of the ranks' values.
Sum = "Sum"
#: The mean of the ranks' values.
Average = "Average"
#: The smallest of the ranks' values, for each element.
Min = "Min"
#: The largest of the ranks' values, for each element.
Max = "Max"
#: The product of the ranks' values.
Product = "Product"
REDUCTIONS = {Sum: _native.SUM, Average: _native.AVERAGE, Min: _native.MIN, Max: _native.MAX, Product: _native.PRODUCT}


def empty(shape: int | Sequence[int], dtype: Any = np.float32, large_pages: bool = False) -> np.ndarray[Any, Any]:
    """An uninitialised array that collectives reduce fastest, in place: ``cc.allreduce(a, out=a)``; so do contiguous views of it.

    Not collective: every rank allocates for itself, and the array stays valid after ``shutdown``. Its memory starts on a page
    and is given back with the last view. Like all memory of the engine it does not exist in forked children.
    ``large_pages``: for large arrays that will be filled, brings all of it into memory at once, in large pages where the system has them.
    A page lies on the NUMA node of the rank that first writes to it: fill an array before it is ``out`` of an operation, in which the
    other ranks would be first.
    Raises :class:`CollectiveError` before ``init``, and when the host's memory is not large enough.
    """
    membership.current()
    kind = np.dtype(dtype)
    dimensions = (shape,) if isinstance(shape, int) else tuple(shape)
    memory = block(math.prod(dimensions) * kind.itemsize, _native.LARGE_PAGES if large_pages else _native.TOUCHED_PAGES)
    if memory is None:
        return np.empty(dimensions, kind)
    return np.frombuffer(memory, dtype=kind).reshape(dimensions)  # type: ignore[call-overload,no-any-return,unused-ignore]


def block(length: int, pages: int) -> Any:
    """Memory of ``length`` bytes, which goes back with the object that has it as its buffer; None of none. As ``_native.allocate``."""
    if length == 0:
        return None
    address = _native.allocate(length, pages)
    memory = (ctypes.c_ubyte * length).from_address(address)
    # Arrays keep `memory` alive; when all are gone, the block goes back.
    weakref.finalize(memory, _native.free, address).atexit = False
    return memory


def reduction_number(op: Any) -> int:
    """The engine's number for ``op``; Sum's for an unsupported one."""
    return REDUCTIONS.get(op, _native.SUM)


def options_of(how: Reduction) -> dict[str, Any]:
    """The options of ``_native.operation`` that say how to combine."""
    return {"reduce": reduction_number(how.op), "prescale": how.prescale, "postscale": how.postscale}


def unsupported_reduction(op: Any, dtype: str, prescale: float = 1.0, postscale: float = 1.0) -> str:
    """Why ``op`` or its factors make no sense for this type; empty if they do."""
    if op not in REDUCTIONS:
        return f"op={op!r} is not possible here; choose from {', '.join(REDUCTIONS)}"
    if dtype == "bool" and op == Average:
        return "the average of booleans is not defined; cast the tensor first"
    if dtype == "bool" and (prescale != 1.0 or postscale != 1.0):
        return "booleans cannot be scaled; cast the tensor first, or leave prescale_factor and postscale_factor away"
    if dtype in _native.PAIRS and op not in (Sum, Average):
        return f"op={op!r} is not defined for {dtype}; use Sum or Average"
    return ""


def unsupported_root(root_rank: int, members: Members) -> str:
    """Why ``root_rank``, a rank of the job, cannot be the root; empty if it can."""
    if root_rank in members.ranks:
        return ""
    where = "this job" if members.id == 0 else f"process set {members.id} of ranks {members.ranks}"
    return f"root rank {root_rank} is not in {where}"


def unsupported_rows(shape: Sequence[int], what: str) -> str:
    """Why a tensor of this shape has no rows to hand out; empty if it has."""
    return "" if shape else f"{what} needs at least one dimension; reshape the scalar to (1,)"


def choose_splits(shape: Sequence[int], splits: Sequence[int] | None, members: Members) -> tuple[list[int], str]:
    """Rows for each rank of an alltoall, and why they are impossible (empty: they are not)."""
    nothing = [0] * members.size
    problem = unsupported_rows(shape, "alltoall")
    if problem:
        return nothing, problem
    rows = shape[0]
    if splits is None:
        if rows % members.size:
            return nothing, f"the first dimension, {rows}, is not divisible by {members.size} ranks: pass splits"
        return [rows // members.size] * members.size, ""
    chosen = [int(split) for split in splits]
    if len(chosen) != members.size:
        return nothing, f"splits {chosen} has {len(chosen)} entries for {members.size} ranks"
    if min(chosen) < 0:
        return nothing, f"splits {chosen} has negative entries"
    if sum(chosen) != rows:
        return nothing, f"splits {chosen} add up to {sum(chosen)}, but the first dimension is {rows}"
    return chosen, ""


def scattered_rows(rows: int, number: int, size: int) -> int:
    """Rows of a reducescatter that a rank gets: as even as can be, the first ranks get one more."""
    return rows // size + (1 if number < rows % size else 0)


def unsupported_array(array: np.ndarray[Any, Any]) -> str:
    """Why an array of this type cannot be sent; empty if it can."""
    if array.dtype.name in _native.DTYPES and array.dtype.isnative:
        return ""
    return f"arrays of {array.dtype} cannot be sent; types: {', '.join(_native.DTYPES)}"


def _contiguous(array: Any) -> tuple[np.ndarray[Any, Any], str, str]:
    """The array, the engine's name of its type, and why it cannot be sent (empty: it can)."""
    # ascontiguousarray would turn a scalar into a vector.
    contiguous = np.asarray(array, order="C")
    problem = unsupported_array(contiguous)
    return contiguous, _native.STAND_IN if problem else contiguous.dtype.name, problem


def _operation(kind: str, source: np.ndarray[Any, Any], dtype: str, members: Members, name: str | None, **rest: Any) -> _native.Operation:
    number = getattr(_native, kind.upper())
    chosen = name or membership.next_name(kind, members.id)
    return _native.operation(number, chosen, dtype, source.shape, source.size, source.ctypes.data, process_set=members.id, **rest)


def _unsupported_out(out: np.ndarray[Any, Any] | None, like: np.ndarray[Any, Any]) -> str:
    if out is None or (out.dtype == like.dtype and out.shape == like.shape and out.flags.c_contiguous and out.flags.writeable):
        return ""
    return f"out must be a writable, contiguous array of {like.dtype}{list(like.shape)}"


@takes("name op prescale_factor postscale_factor process_set out")
def allreduce(
    array: Any, name: Any, op: Any, prescale_factor: Any, postscale_factor: Any, process_set: Any, out: Any
) -> np.ndarray[Any, Any]:
    """Combines the arrays of all ranks element by element, in one order; returns a new array of the same shape, or ``out``.

    ``out``: a contiguous array of the same type and shape, which may be ``array`` itself. float16 and bfloat16 are summed in
    float32 and rounded once; of hosts with several ranks each host's sum is rounded to travel, too, unless
    ``COLLECTIVE_SUM_ORDER=ranks``: at most u (|S| + (1 + u) (|S1| + |S2| + ...)) from the exact sum S of hosts' sums S1, S2, ...,
    besides float32's own errors, with u = 2**-8 for bfloat16 and 2**-11 for float16. Integers wrap on overflow as in NumPy.
    ``prescale_factor`` multiplies each input, ``postscale_factor``
    the result; of integers, both round towards zero, and so does the average.
    """
    repeats = out is array
    arguments = (name, op, prescale_factor, postscale_factor, process_set)
    if repeats:
        fault = _native.run_prepared(array, *arguments, array.dtype)
        if fault is not None:
            if fault:
                operations.check_prepared(fault, array)
            return array  # type: ignore[no-any-return]
    members = members_of(process_set)
    source, dtype, problem = _contiguous(array)
    problem = problem or unsupported_reduction(op, dtype, prescale_factor, postscale_factor) or _unsupported_out(out, source)
    result = np.empty_like(source) if out is None or problem else out
    # Without a name: blocking operations follow each other in the order of the calls, and a repeated one has no other.
    operation = _native.operation(_native.ALLREDUCE, name or "", dtype, source.shape, source.size, source.ctypes.data, result.ctypes.data)
    operation.reduce, operation.process_set, operation.unsupported_reason = reduction_number(op), members.id, problem.encode() or None
    operation.prescale, operation.postscale = prescale_factor, postscale_factor
    operations.run(operation, source, result)
    if repeats:
        # Of factors that are arrays the value, which the program may change. The memory stays: NumPy resizes none with a weak reference.
        arguments = (name, op, float(prescale_factor), float(postscale_factor), process_set)
        prepared.note(array, (*arguments, array.dtype), operation)
    return result


@takes("name op prescale_factor postscale_factor process_set")
def reducescatter(array: Any, name: str | None, how: Reduction) -> np.ndarray[Any, Any]:
    """This rank's rows of what :func:`allreduce` would give: as even as can be, the first ranks get one row more."""
    members = members_of(how.process_set)
    source, dtype, problem = _contiguous(array)
    problem = problem or unsupported_reduction(how.op, dtype, how.prescale, how.postscale)
    problem = problem or unsupported_rows(source.shape, "reducescatter")
    rows = 0 if problem else scattered_rows(source.shape[0], members.rank, members.size)
    result = np.empty((rows, *source.shape[1:]), dtype=source.dtype)
    more = {**options_of(how), "unsupported_reason": problem}
    operations.run(_operation("reducescatter", source, dtype, members, name, target=result.ctypes.data, **more), source, result)
    return result


def broadcast(
    array: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    out: np.ndarray[Any, Any] | None = None,
) -> np.ndarray[Any, Any]:
    """The root's array on every rank, as a new array, or in ``out``; all ranks pass one of the same type and shape.

    ``out``: a contiguous array of that type and shape, which may be ``array`` itself.
    """
    members = members_of(process_set)
    source, dtype, problem = _contiguous(array)
    problem = problem or _unsupported_out(out, source)
    if out is None or problem:
        result = source.copy()
    else:
        result = out
        if out is not array:
            np.copyto(result, source)
    how = {"root": members.number_of(root_rank), "unsupported_reason": problem or unsupported_root(root_rank, members)}
    operations.run(_operation("broadcast", result, dtype, members, name, target=result.ctypes.data, **how), result)
    return result


def allgather(array: Any, name: str | None = None, process_set: ProcessSet | None = None) -> np.ndarray[Any, Any]:
    """All ranks' arrays one after the other along the first dimension, which may differ between ranks."""
    return allgather_with_rows(array, name, process_set)[0]


def allgather_with_rows(
    array: Any, name: str | None = None, process_set: ProcessSet | None = None
) -> tuple[np.ndarray[Any, Any], list[int]]:
    """What :func:`allgather` returns, and the rows of each rank in it."""
    members = members_of(process_set)
    source, dtype, problem = _contiguous(array)
    problem = problem or unsupported_rows(source.shape, "allgather")
    return _received(_operation("allgather", source, dtype, members, name, unsupported_reason=problem), source, members)


def alltoall(
    array: Any, splits: Sequence[int] | None = None, name: str | None = None, process_set: ProcessSet | None = None
) -> tuple[np.ndarray[Any, Any], list[int]]:
    """Sends ``splits[r]`` rows to every rank r (default: the same number); returns what came, in rank order, and rows per rank."""
    members = members_of(process_set)
    source, dtype, problem = _contiguous(array)
    chosen, other_problem = choose_splits(source.shape, splits, members)
    unsupported_reason = problem or other_problem
    return _received(
        _operation("alltoall", source, dtype, members, name, splits=chosen, unsupported_reason=unsupported_reason), source, members
    )


def allgather_without_joined(array: np.ndarray[Any, Any], name: str, process_set: ProcessSet | None) -> np.ndarray[Any, Any]:
    """An :func:`allgather` for agreements of our own: ranks that have joined are left out whatever the semantics."""
    members = members_of(process_set)
    return _received(_operation("allgather", array, array.dtype.name, members, name, inner=True), array, members)[0]


def alltoall_without_joined(
    array: np.ndarray[Any, Any], name: str, process_set: ProcessSet | None
) -> tuple[np.ndarray[Any, Any], list[int]]:
    """An :func:`alltoall` of as many rows to each rank, for what is made of it: goes on as :func:`allgather_without_joined` does."""
    members = members_of(process_set)
    splits, _ = choose_splits(array.shape, None, members)
    return _received(_operation("alltoall", array, array.dtype.name, members, name, splits=splits, inner=True), array, members)


def _received(operation: _native.Operation, source: np.ndarray[Any, Any], members: Members) -> tuple[np.ndarray[Any, Any], list[int]]:
    buffer, rows = operations.gather(operation, source, members.size)
    return buffer.view(source.dtype).reshape((sum(rows), *source.shape[1:])), rows


def barrier(name: str | None = None, process_set: ProcessSet | None = None) -> None:
    """Returns when every rank of the process set has called it."""
    members = members_of(process_set)
    operations.run(
        _native.operation(_native.BARRIER, name or membership.next_name("barrier", members.id), "uint8", (), 0, process_set=members.id)
    )


def join(process_set: ProcessSet | None = None) -> int:
    """For a rank without further data: takes part in what the others still do, until all have joined.

    It adds nothing to sums, an average divides by the ranks that have not joined, and it contributes no rows. Returns the
    rank (of the job) that joined last.
    """
    members = members_of(process_set)
    handle = _native.submit(_native.operation(_native.JOIN, "join", "uint8", (), 0, process_set=members.id), _native.BLOCKING)
    operations.wait(handle)
    _, received = operations.take_received(handle, members.size)
    membership.forget_names(members.id)  # ranks with less data have called less
    return members.ranks[received[0]]
