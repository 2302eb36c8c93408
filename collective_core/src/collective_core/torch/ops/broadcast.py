"""Broadcast on torch tensors: blocking, in place, asynchronous, differentiable."""

from __future__ import annotations

from typing import Any

import torch

from collective_core import _native, arrays
from collective_core.arrays import Average
from collective_core.runtime import membership
from collective_core.runtime.process_sets import ProcessSet, members_of
from collective_core.torch import gpu
from collective_core.torch.compiling import not_compiled
from collective_core.torch.handles import Work, handle_of
from collective_core.torch.ops.allreduce import allreduce
from collective_core.torch.ops.tensors import (
    host_copy,
    is_in_host_memory,
    is_plain,
    new_like,
    operation_on,
    raise_versions,
    start_on_host,
    unsupported_tensor,
)


def _start(
    tensor: torch.Tensor,
    output: torch.Tensor,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet | None,
    blocking: bool = False,
) -> Work | gpu.Copying:
    """Writes the root's ``tensor`` into every rank's ``output``, which may be the same."""
    members = members_of(process_set)
    problem = unsupported_tensor(tensor) or arrays.unsupported_root(root_rank, members)
    on_gpu = gpu.moves_with_nccl(tensor, members) and not problem
    is_root = members.ranks[members.rank] == root_rank
    in_place = not problem and is_plain(output) and (on_gpu or is_in_host_memory(output)) and output.is_contiguous()

    def operation(source: int, target: int) -> _native.Operation:
        chosen, count = name or membership.next_name("broadcast", members.id), 0 if problem else None
        rest = {"root": members.number_of(root_rank), "process_set": members.id, "unsupported_reason": problem}
        return operation_on(tensor, _native.BROADCAST, chosen, source, target, on_gpu, count, **rest)

    def finish() -> torch.Tensor:
        with torch.no_grad():
            if is_root and not on_gpu:  # the engine leaves its output alone
                if output is not tensor:
                    output.copy_(tensor)
            elif not in_place:
                output.copy_(target, non_blocking=copied is not None)
        raise_versions((output,))  # of the root, too: what fails, fails on all ranks
        return output

    if on_gpu:
        copied, target = None, output.detach() if in_place else new_like(tensor.detach())
        if is_root and (output is not tensor or not in_place):
            target.copy_(tensor.detach())
        return gpu.start(target, target, operation, members, blocking, finish)
    source, copied = host_copy(tensor)
    target = output.detach() if in_place else source if copied is not None else torch.empty_like(source)
    return start_on_host(operation(source.data_ptr(), target.data_ptr()), copied, blocking, finish, source, target)


class _Broadcast(torch.autograd.Function):
    """The root's gradient is, as in Horovod, the average of all; the others' tensors were not used."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet | None) -> torch.Tensor:
        ctx.root_rank = root_rank
        ctx.process_set = process_set
        result: torch.Tensor = _start(tensor, new_like(tensor), root_rank, name, process_set, blocking=True).result()
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _AverageForRoot.apply(gradients[0], ctx.root_rank, ctx.process_set), None, None, None


class _AverageForRoot(torch.autograd.Function):
    """The gradient of a broadcast: the other ranks have zeros. Its own gradient is a broadcast."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, process_set: ProcessSet | None) -> torch.Tensor:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        average = allreduce(tensor, op=Average, process_set=process_set)
        return average if membership.rank() == root_rank else torch.zeros_like(average)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return broadcast(gradients[0], ctx.root_rank, process_set=ctx.process_set), None, None


@not_compiled
def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None) -> torch.Tensor:
    """The root's tensor on every rank, as a new tensor. ``root_rank`` is a rank of the job, also with a process set."""
    output: torch.Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)
    return output


@not_compiled
def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None) -> torch.Tensor:
    """Overwrites ``tensor`` with the root's, and returns it."""
    result: torch.Tensor = _start(tensor, tensor, root_rank, name, process_set, blocking=True).result()
    return result


@not_compiled
def broadcast_async(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None) -> int:
    """Starts a :func:`broadcast`; ``synchronize`` returns the new tensor."""
    return handle_of(_start(tensor, new_like(tensor), root_rank, name, process_set))


@not_compiled
def broadcast_async_(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None) -> int:
    """Starts a :func:`broadcast_`."""
    return handle_of(_start(tensor, tensor, root_rank, name, process_set))
