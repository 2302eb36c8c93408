"""Allgather on torch tensors: blocking, asynchronous, in groups, differentiable."""

from __future__ import annotations

from operator import itemgetter
from typing import Any, Sequence

import torch

from collective_core import _native, arrays
from collective_core.arrays import Average
from collective_core.runtime.process_sets import ProcessSet, members_of
from collective_core.torch.compiling import not_compiled
from collective_core.torch.handles import Group, Mapped, handle_of
from collective_core.torch.ops.allreduce import allreduce
from collective_core.torch.tensors import describe, names_of_group
from collective_core.torch.ways import start_rows


def start(
    tensor: torch.Tensor, name: str | None, process_set: ProcessSet | None, blocking: bool = False, unsupported_reason: str = ""
) -> Any:
    """The result of the work is the gathered tensor and the rows of each rank. ``unsupported_reason``: of the caller's own."""
    members = members_of(process_set)
    problem = unsupported_reason or arrays.unsupported_rows(tensor.shape, "allgather")
    asked = describe(_native.ALLGATHER, tensor, name, members.id, problem)
    return start_rows(asked, tensor, blocking, members.size)


def _start_group(tensors: Sequence[torch.Tensor], name: str | None, process_set: ProcessSet | None) -> Group:
    names = names_of_group(name, len(tensors)) if len(tensors) > 1 else [name]
    return Group([start(tensor, n, process_set, blocking=len(tensors) == 1) for tensor, n in zip(tensors, names)])


class _Allgather(torch.autograd.Function):
    """The gradient of an allgather is, as in Horovod, this rank's part of the average of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet | None, *tensors: torch.Tensor) -> Any:
        results = _start_group(tensors, name, process_set).result()
        ctx.rows = [rows for _, rows in results]
        ctx.process_set = process_set
        return tuple(gathered for gathered, _ in results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, None, *_PartsOfAverage.apply(ctx.rows, ctx.process_set, *gradients)


class _PartsOfAverage(torch.autograd.Function):
    """The gradient of an allgather. Its own gradient is an allgather."""

    @staticmethod
    def forward(ctx: Any, rows_of_each: list[list[int]], process_set: ProcessSet | None, *gradients: torch.Tensor) -> Any:
        ctx.process_set = process_set
        number, mine = members_of(process_set).rank, []
        for gradient, rows in zip(gradients, rows_of_each):
            average = allreduce(gradient, op=Average, process_set=process_set)
            mine.append(average.split(rows)[number])
        return tuple(mine)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, None, *_Allgather.apply(None, ctx.process_set, *gradients)


@not_compiled
def allgather(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet | None = None) -> torch.Tensor:
    """All ranks' tensors one after the other along the first dimension, which may differ between ranks."""
    output: torch.Tensor = _Allgather.apply(name, process_set, tensor)[0]
    return output


@not_compiled
def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet | None = None) -> int:
    """Starts an :func:`allgather`; ``synchronize`` returns the new tensor."""
    return handle_of(Mapped(start(tensor, name, process_set), itemgetter(0)))


@not_compiled
def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet | None = None
) -> list[torch.Tensor]:
    """:func:`allgather` of several tensors, all started before the first is waited for."""
    return list(_Allgather.apply(name, process_set, *tensors)) if tensors else []


@not_compiled
def grouped_allgather_async(tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet | None = None) -> int:
    """Starts a :func:`grouped_allgather`; ``synchronize`` returns the list."""
    works = [Mapped(start(tensor, n, process_set), itemgetter(0)) for tensor, n in zip(tensors, names_of_group(name, len(tensors)))]
    return handle_of(Group(works))
