"""Reduce-scatter on torch tensors: every rank keeps its rows of the reduced tensor."""

from __future__ import annotations

from typing import Any, Sequence

import torch

from collective_core import _native, arrays
from collective_core.arrays import Sum
from collective_core.runtime.process_sets import members_of
from collective_core.runtime.reductions import Reduction, takes
from collective_core.torch.compiling import not_compiled
from collective_core.torch.compression import Compression
from collective_core.torch.handles import Group, handle_of
from collective_core.torch.ops.allgather import allgather
from collective_core.torch.tensors import describe, dtype_name, names_of_group
from collective_core.torch.ways import start


def _start(tensor: torch.Tensor, name: str | None, how: Reduction) -> Any:
    members = members_of(how.process_set)
    problem = arrays.unsupported_reduction(how.op, dtype_name(tensor), how.prescale, how.postscale)
    problem = problem or arrays.unsupported_rows(tensor.shape, "reducescatter")
    asked = describe(_native.REDUCESCATTER, tensor, name, members.id, problem, **arrays.options_of(how))
    rows = 0 if asked.unsupported_reason else arrays.scattered_rows(tensor.shape[0], members.rank, members.size)
    output = torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
    return start(asked, tensor, output, blocking=False)


def _start_group(tensors: Sequence[torch.Tensor], name: str | None, how: Reduction) -> Group:
    names = names_of_group(name, len(tensors)) if len(tensors) > 1 else [name]
    return Group([_start(tensor, n, how) for tensor, n in zip(tensors, names)])


class _Reducescatter(torch.autograd.Function):
    """Every input element went into one rank's result: the gradients of all ranks, gathered; of a sum, times the ranks (Horovod)."""

    @staticmethod
    def forward(ctx: Any, name: str | None, how: Reduction, *tensors: torch.Tensor) -> Any:
        ctx.how = how
        return tuple(_start_group(tensors, name, how).result())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        how = ctx.how
        how.require_gradient("a reducescatter")
        factor = how.prescale * how.postscale
        if how.op == Sum:
            factor *= members_of(how.process_set).size
        scaled = [gradient * factor if factor != 1.0 else gradient for gradient in gradients]
        return None, None, *(allgather(gradient, process_set=how.process_set) for gradient in scaled)


_FORM = "name op process_set prescale_factor postscale_factor"
_COMPRESSED_FORM = "name compression op process_set prescale_factor postscale_factor"


@not_compiled
@takes(_COMPRESSED_FORM, compression=Compression.none)
def reducescatter(tensor: torch.Tensor, name: str | None, how: Reduction, compression: Any) -> torch.Tensor:
    """This rank's rows of the reduced tensor: as even as can be, the first ranks get one row more."""
    return _reduced([tensor], name, how, compression)[0]


@not_compiled
@takes(_FORM)
def reducescatter_async(tensor: torch.Tensor, name: str | None, how: Reduction) -> int:
    """Starts a :func:`reducescatter`; ``synchronize`` returns the new tensor."""
    return handle_of(_start(tensor, name, how))


@not_compiled
@takes(_COMPRESSED_FORM, compression=Compression.none)
def grouped_reducescatter(tensors: Sequence[torch.Tensor], name: str | None, how: Reduction, compression: Any) -> list[torch.Tensor]:
    """:func:`reducescatter` of several tensors, all started before the first is waited for."""
    return _reduced(tensors, name, how, compression)


def _reduced(tensors: Sequence[torch.Tensor], name: str | None, how: Reduction, compression: Any) -> list[torch.Tensor]:
    pairs = [compression.compress(tensor) for tensor in tensors]
    outputs = _Reducescatter.apply(name, how, *(small for small, _ in pairs)) if pairs else ()
    return [compression.decompress(output, restore) for output, (_, restore) in zip(outputs, pairs)]


@not_compiled
@takes(_FORM)
def grouped_reducescatter_async(tensors: Sequence[torch.Tensor], name: str | None, how: Reduction) -> int:
    """Starts a :func:`grouped_reducescatter`; ``synchronize`` returns the list."""
    return handle_of(_start_group(tensors, name, how))
