"""Allgather and alltoall of a torch tensor where it lies: on the GPU through NCCL, or through host memory."""

from __future__ import annotations

from typing import Sequence

import torch

from collective_core import _native
from collective_core.runtime import operations
from collective_core.runtime.process_sets import Members
from collective_core.torch import gpu
from collective_core.torch.handles import Work
from collective_core.torch.ops.tensors import host_copy, operation_on, received_tensor


def start_rows(
    kind: int, tensor: torch.Tensor, name: str, members: Members, blocking: bool, problem: str, splits: Sequence[int] | None = None
) -> Work | gpu.Copying:
    """Starts one of the two. ``problem``: why this rank cannot; then every rank raises it. ``splits``: of an alltoall, rows for each rank.

    The result of the work is the tensor received and the rows from each rank.
    """
    on_gpu = gpu.moves_with_nccl(tensor, members) and not problem
    source, copied = (tensor.detach().resolve_conj().resolve_neg().contiguous(), None) if on_gpu else host_copy(tensor)
    rest = {"process_set": members.id, "splits": splits, "unsupported_reason": problem, "count": source.numel()}
    operation = operation_on(tensor, kind, name, source.data_ptr(), on_gpu=on_gpu, **rest)
    if on_gpu:
        return gpu.start_rows(source, operation, members, blocking)

    def begin() -> Work:
        handle = _native.submit(operation, _native.BLOCKING if blocking else _native.QUEUED)

        def finish() -> tuple[torch.Tensor, list[int]]:
            buffer, rows = operations.take_received(handle, members.size)
            return received_tensor(buffer, rows, tensor), rows

        return Work(handle, finish, (source, operation), keeps_handle=True)

    return gpu.when_copied(copied, begin, blocking)
