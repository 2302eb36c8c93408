"""Sums of arrays of which few rows are not zero, given as these rows and their indices: everyone's are gathered and merged."""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np

from collective_core import _native, arrays
from collective_core.arrays import Average, Sum
from collective_core.runtime import membership, operations
from collective_core.runtime.process_sets import ProcessSet, members_of

#: Their sums are formed in float32 and rounded once, as those of dense arrays.
_HALF_TYPES = ("float16", "bfloat16")


def sparse_allreduce(
    indices: np.ndarray[Any, Any],
    values: np.ndarray[Any, Any],
    shape: Sequence[int],
    name: str | None = None,
    op: str = Average,
    process_set: ProcessSet | None = None,
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The rows ``values``, shape (rows, ...), at ``indices``, shape (rows,), of arrays of ``shape``: the sum or average of all ranks'.

    Returns indices, each once and in ascending order, and values. An index that occurs twice is merged before it is sent. An average
    divides by the ranks that have not joined. Raises :class:`CollectiveError` on all ranks where they differ in type, shape or ``op``.
    ``shape``: empty where it is not known.
    """
    members = members_of(process_set)
    chosen = name or membership.next_name("sparse_allreduce", members.id)
    problem = arrays.unsupported_array(values)
    if op not in (Sum, Average):
        problem = f"op={op!r} is not possible with sparse arrays; use Sum or Average"
    dtype = _native.STAND_IN if problem else values.dtype.name
    # An allreduce of no element, in which the ranks compare what each of them has: gathering does not.
    agreement = _native.operation(
        _native.ALLREDUCE, chosen, dtype, (0, *shape), 0, reduce=arrays.reduction_number(op), process_set=members.id
    )
    agreement.unsupported_reason = problem.encode() or None
    operations.run(agreement)
    rows, sums = _merge(indices, values)  # half types as float32: their sums are rounded once, at the end
    # One more index: a rank that has no rows differs from one that has joined, and sends nothing.
    marked = np.append(rows, np.array([-1], dtype=rows.dtype))
    everyone = arrays.allgather(marked, f"{chosen}.indices", process_set)
    gathered = arrays.allgather(sums, f"{chosen}.values", process_set)
    is_marker = everyone < 0
    merged, total = _merge(everyone[~is_marker], gathered)
    if op == Average:
        total = total / np.asarray(np.count_nonzero(is_marker), total.dtype)
    return merged, total.astype(values.dtype, copy=False)


def _merge(indices: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Every index once; its values are added in the order in which they come. The sums of half types are float32."""
    unique, place = np.unique(indices, return_inverse=True)
    wide = np.zeros((len(unique), *values.shape[1:]), np.float32 if values.dtype.name in _HALF_TYPES else values.dtype)
    np.add.at(wide, place.reshape(-1), values.astype(wide.dtype, copy=False))
    return unique, wide
