"""Allreduce of sparse tensors: everyone's rows are gathered and merged."""

from __future__ import annotations

import torch

from collective_core.arrays import Average, Sum
from collective_core.errors import CollectiveError
from collective_core.process_sets import ProcessSet
from collective_core.torch.ops import allgather
from collective_core.torch.ops.allreduce import allreduce_async
from collective_core.torch.ops.handles import Work, handle_of, poll, synchronize
from collective_core.torch.ops.tensors import dtype_name


class SparseHandle(int):
    """A handle that, as Horovod's of a sparse allreduce, can also be called for the result."""

    def __call__(self) -> torch.Tensor:
        result: torch.Tensor = synchronize(self)
        return result


class _SparseWork:
    def __init__(self, tensor: torch.Tensor, indices: Work, values: Work, contributors: int | None) -> None:
        self._tensor = tensor
        self._indices = indices
        self._values = values
        self._contributors = contributors  # handle of their number, for an average

    def is_done(self) -> bool:
        return self._indices.is_done() and self._values.is_done() and (self._contributors is None or poll(self._contributors))

    def result(self) -> torch.Tensor:
        indices, _ = self._indices.result()
        values, _ = self._values.result()
        whole = torch.sparse_coo_tensor(indices.t(), values, self._tensor.shape, check_invariants=False).coalesce()
        return whole if self._contributors is None else whole / float(synchronize(self._contributors))


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: str = Average, process_set: ProcessSet | None = None
) -> SparseHandle:
    """Starts the sum or average of sparse tensors; ``synchronize``, or a call of the handle, returns it, with every index once.

    Indices that occur twice are merged before they are sent. An average divides by the ranks that have not joined.
    """
    if op not in (Sum, Average):
        raise CollectiveError(f"op={op!r} is not possible with sparse tensors; use Sum or Average", "invalid")
    mine = tensor.coalesce()
    dtype_name(mine.values())  # it can be sent, before the indices are under way
    names = [f"{name}.{part}" if name else None for part in ("indices", "values", "contributors")]
    indices = allgather.start(mine.indices().t(), names[0], process_set)
    values = allgather.start(mine.values(), names[1], process_set)
    contributors = allreduce_async(torch.ones(()), name=names[2], op=Sum, process_set=process_set) if op == Average else None
    return SparseHandle(handle_of(_SparseWork(tensor, indices, values, contributors)))
