"""Broadcast on torch tensors: blocking, in place, asynchronous, differentiable."""

from __future__ import annotations

from typing import Any

import torch

from collective_core import _native, arrays
from collective_core.arrays import Average
from collective_core.runtime import membership
from collective_core.runtime.process_sets import ProcessSet, members_of
from collective_core.torch.compiling import not_compiled
from collective_core.torch.handles import handle_of
from collective_core.torch.ops.allreduce import allreduce
from collective_core.torch.tensors import describe, new_like
from collective_core.torch.ways import start


def _start(
    tensor: torch.Tensor,
    output: torch.Tensor,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet | None,
    blocking: bool = False,
) -> Any:
    """Writes the root's ``tensor`` into every rank's ``output``, which may be the same."""
    members = members_of(process_set)
    problem = arrays.unsupported_root(root_rank, members)
    asked = describe(_native.BROADCAST, tensor, name, members.id, problem, root=members.number_of(root_rank))
    return start(asked, tensor, output, blocking, is_root=members.ranks[members.rank] == root_rank)


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
