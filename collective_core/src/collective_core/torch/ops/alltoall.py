"""All-to-all on torch tensors: every rank sends a part of its rows to every rank."""

from __future__ import annotations

from typing import Any, Sequence

import torch

from collective_core import _native, arrays
from collective_core.runtime.process_sets import ProcessSet, members_of
from collective_core.torch.compiling import not_compiled
from collective_core.torch.handles import Mapped, handle_of
from collective_core.torch.tensors import describe
from collective_core.torch.ways import start_rows

#: Rows for each rank: a list, or a tensor of integers with one dimension.
Splits = Any


def _list_of(splits: Splits) -> tuple[Sequence[int] | None, str]:
    """The splits as numbers, and why they cannot be."""
    if splits is None or (torch.is_tensor(splits) and splits.numel() == 0 and splits.dtype == torch.int32):
        return None, ""
    if torch.is_tensor(splits):
        if splits.dtype not in (torch.int32, torch.int64) or splits.dim() != 1:
            return None, f"splits must be a tensor of int32 with one dimension, not of {splits.dtype} with {splits.dim()}"
        return splits.tolist(), ""
    try:
        return [int(split) for split in splits], ""
    except (TypeError, ValueError):
        return None, f"splits must be a list of numbers or a tensor of int32, not {splits!r}"


def _start(tensor: torch.Tensor, splits: Splits, name: str | None, process_set: ProcessSet | None, blocking: bool = False) -> Mapped:
    """The result of the work is the received tensor and the rows from each rank."""
    members = members_of(process_set)
    wanted, problem = _list_of(splits)
    chosen, other_problem = arrays.choose_splits(tuple(tensor.shape), wanted, members)
    asked = describe(_native.ALLTOALL, tensor, name, members.id, problem or other_problem, splits=chosen)
    work = start_rows(asked, tensor, blocking, members.size)
    device = splits.device if torch.is_tensor(splits) else None
    return Mapped(work, lambda result: (result[0], torch.tensor(result[1], dtype=torch.int32, device=device)))


class _Alltoall(torch.autograd.Function):
    """Gradients go back the way that the rows came."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Splits, name: str | None, process_set: ProcessSet | None) -> Any:
        received, rows = _start(tensor, splits, name, process_set, blocking=True).result()
        ctx.rows = rows
        ctx.process_set = process_set
        ctx.mark_non_differentiable(rows)
        return received, rows

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        returned, _ = _Alltoall.apply(gradients[0], ctx.rows, None, ctx.process_set)
        return returned, None, None, None


@not_compiled
def alltoall(tensor: torch.Tensor, splits: Splits = None, name: str | None = None, process_set: ProcessSet | None = None) -> Any:
    """Sends ``splits[r]`` rows to every rank r; returns what came from all ranks, in rank order.

    With ``splits``, returns a pair: the tensor, and the rows from each rank as a tensor of int32, where ``splits`` lies. Without,
    every rank is sent the same number of rows.
    """
    received, rows = _Alltoall.apply(tensor, splits, name, process_set)
    return received if splits is None else (received, rows)


@not_compiled
def alltoall_async(tensor: torch.Tensor, splits: Splits = None, name: str | None = None, process_set: ProcessSet | None = None) -> int:
    """Starts an :func:`alltoall`; ``synchronize`` returns the received tensor and the rows from each rank, also without ``splits``."""
    return handle_of(_start(tensor, splits, name, process_set))
