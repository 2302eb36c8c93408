"""Allreduce of sparse tensors: everyone's rows are gathered and merged."""

from __future__ import annotations

import torch

from collective_core import _native, arrays
from collective_core.arrays import Average, Sum
from collective_core.runtime import membership
from collective_core.runtime.process_sets import ProcessSet, members_of
from collective_core.torch.compiling import not_compiled
from collective_core.torch.handles import Work, handle_of, results_of, synchronize
from collective_core.torch.ops import allgather
from collective_core.torch.tensors import unsupported_tensor, without_data

#: Their sums are formed in float32 and rounded once, as those of dense tensors.
_HALF_TYPES = (torch.float16, torch.bfloat16)


class SparseHandle(int):
    """A handle that, as Horovod's of a sparse allreduce, can also be called for the result."""

    def __call__(self) -> torch.Tensor:
        result: torch.Tensor = synchronize(self)
        return result


class _SparseWork:
    """``parts``: the agreement on what is reduced, the marked indices and the values."""

    def __init__(self, tensor: torch.Tensor, op: str, parts: list[Work]) -> None:
        self._tensor = tensor
        self._op = op
        self._parts = parts

    def is_done(self) -> bool:
        return all(part.is_done() for part in self._parts)

    def result(self) -> torch.Tensor:
        _, (marked, rows), (values, _) = results_of([part.result for part in self._parts])
        indices = [part[:-1] for part in marked.split(rows) if len(part)]
        wide = values.float() if values.dtype in _HALF_TYPES else values
        whole = torch.sparse_coo_tensor(torch.cat(indices).t(), wide, self._tensor.shape, check_invariants=False).coalesce()
        result = whole if self._op == Sum else whole / float(len(indices))
        return result.to(values.dtype) if values.dtype in _HALF_TYPES else result


def _merged(tensor: torch.Tensor) -> torch.Tensor:
    """Every index once."""
    if tensor.is_coalesced() or tensor.dtype not in _HALF_TYPES:
        return tensor.coalesce()
    return tensor.float().coalesce().to(tensor.dtype)


def _unsupported_reason(tensor: torch.Tensor, op: str) -> str:
    """Why the tensor cannot be reduced; empty if it can."""
    if op not in (Sum, Average):
        return f"op={op!r} is not possible with sparse tensors; use Sum or Average"
    return unsupported_tensor(tensor, torch.sparse_coo)


def _marked_indices(tensor: torch.Tensor) -> torch.Tensor:
    """A row of indices for each value, and one more: a rank that has no values differs from one that has joined, and sends nothing."""
    rows = tensor.indices().t()
    return torch.cat([rows, rows.new_full((1, rows.shape[1]), -1)])


@not_compiled
def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: str = Average, process_set: ProcessSet | None = None
) -> SparseHandle:
    """Starts the sum or average of sparse tensors; ``synchronize``, or a call of the handle, returns it, with every index once.

    Indices that occur twice are merged before they are sent. An average divides by the ranks that have not joined.
    """
    members = members_of(process_set)
    problem = _unsupported_reason(tensor, op)
    chosen = name or membership.next_name("allreduce", members.id)
    agreement = without_data(tensor, chosen, members.id, problem, layout=torch.sparse_coo, reduce=arrays.reduction_number(op))
    mine = torch.zeros(1, 1, device=tensor.device).to_sparse() if problem else _merged(tensor)
    parts = [
        Work(_native.submit(agreement), lambda: None, agreement),
        allgather.start(_marked_indices(mine), f"{name}.indices" if name else None, process_set, unsupported_reason=problem),
        allgather.start(mine.values(), f"{name}.values" if name else None, process_set, unsupported_reason=problem),
    ]
    return SparseHandle(handle_of(_SparseWork(tensor, op, parts)))
