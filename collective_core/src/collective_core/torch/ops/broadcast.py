"""Broadcast on torch tensors: blocking, in place, asynchronous, differentiable."""

from __future__ import annotations

from typing import Any

import torch

from collective_core import _native, arrays
from collective_core.arrays import Average
from collective_core.runtime import membership, operations
from collective_core.runtime.process_sets import ProcessSet, members
from collective_core.torch import gpu
from collective_core.torch.compiling import not_compiled
from collective_core.torch.handles import Work, handle_of
from collective_core.torch.ops.allreduce import allreduce
from collective_core.torch.ops.tensors import device_number, dtype_name, host_copy, new_like, objection_to_tensor


def _start(
    tensor: torch.Tensor,
    output: torch.Tensor,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet | None,
    blocking: bool = False,
) -> Work:
    """Writes the root's ``tensor`` into every rank's ``output``, which may be the same."""
    who = members(process_set)
    problem = objection_to_tensor(tensor) or arrays.objection_to_root(root_rank, who)
    if gpu.moves_with_nccl(tensor, who) and not problem:
        return _start_on_gpu(tensor, output, root_rank, name, process_set, blocking)
    source = host_copy(tensor)
    in_place = not problem and output.device.type == "cpu" and output.is_contiguous()
    target = output.detach() if in_place else torch.empty_like(source)
    operation = _native.operation(
        _native.BROADCAST,
        name or membership.next_name("broadcast", who.id),
        dtype_name(tensor),
        tuple(tensor.shape),
        source.numel(),
        source.data_ptr(),
        target.data_ptr(),
        root=who.number_of(root_rank),
        process_set=who.id,
        objection=problem,
        device=device_number(tensor),
    )

    def finish() -> torch.Tensor:
        # The engine leaves the root's output alone.
        if who.ranks[who.rank] == root_rank:
            if output is not tensor:
                with torch.no_grad():
                    output.copy_(tensor)
        elif not in_place:
            with torch.no_grad():
                output.copy_(target)
        return output

    if blocking:
        operations.run(operation, source, target)
        return Work(0, finish)
    return Work(_native.submit(operation), finish, (source, target, operation))


def _start_on_gpu(
    tensor: torch.Tensor, output: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet | None, blocking: bool
) -> Work:
    who = members(process_set)

    def operation(source: int, target: int) -> _native.Operation:
        return _native.operation(
            _native.BROADCAST,
            name or membership.next_name("broadcast", who.id),
            dtype_name(tensor),
            tuple(tensor.shape),
            tensor.numel(),
            source,
            target,
            root=who.number_of(root_rank),
            process_set=who.id,
            device=_native.GPU_MEMORY,
        )

    return gpu.start(tensor, output, operation, who, blocking)


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
        gradient = allreduce(gradients[0], op=Average, process_set=ctx.process_set)
        if membership.rank() != ctx.root_rank:
            gradient = torch.zeros_like(gradient)
        return gradient, None, None, None


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
