"""Reduce-scatter on torch tensors: every rank keeps its rows of the reduced tensor."""

from __future__ import annotations

from typing import Any, Sequence

import torch

from collective_core import _native, arrays
from collective_core.arrays import Average, Sum
from collective_core.runtime import membership
from collective_core.runtime.process_sets import members_of
from collective_core.runtime.reductions import Reduction, takes
from collective_core.torch import gpu, nccl
from collective_core.torch.compiling import not_compiled
from collective_core.torch.compression import Compression
from collective_core.torch.handles import Group, Work, handle_of
from collective_core.torch.ops.allgather import allgather
from collective_core.torch.ops.tensors import dtype_name, host_copy, names_of_group, operation_on, start_on_host, unsupported_tensor


def _start(tensor: torch.Tensor, name: str | None, how: Reduction) -> Work | gpu.Copying:
    members = members_of(how.process_set)
    dtype = dtype_name(tensor)
    problem = unsupported_tensor(tensor) or arrays.unsupported_reduction(how.op, dtype, how.prescale, how.postscale)
    problem = problem or arrays.unsupported_rows(tensor.shape, "reducescatter")
    on_gpu = gpu.reduces_with_nccl(tensor, how.op, how.prescale, how.postscale, members) and not problem
    source, copied = (tensor.detach().resolve_conj().resolve_neg().contiguous(), None) if on_gpu else host_copy(tensor)
    rows = 0 if problem else arrays.scattered_rows(tensor.shape[0], members.rank, members.size)
    target = torch.empty((rows, *tensor.shape[1:]), dtype=source.dtype, device=source.device)

    def operation(begin: int, into: int) -> _native.Operation:
        chosen = name or membership.next_name("reducescatter", members.id)
        rest = {**arrays.options_of(how), "process_set": members.id, "unsupported_reason": problem, "count": source.numel()}
        # A rank without rows still takes part: the engine wants an address, and nothing is written there.
        return operation_on(tensor, _native.REDUCESCATTER, chosen, begin, into or begin, on_gpu, **rest)

    if on_gpu:
        is_scaled = how.prescale != 1.0 or (how.op == Average and tensor.dtype in nccl.HALF)
        if (is_scaled or tensor.shape[0] % members.size) and source.data_ptr() == tensor.data_ptr():
            source = source.clone()
        return gpu.start(source, target, operation, members, False, lambda: target, how.prescale, how.postscale)
    asked = operation(source.data_ptr(), target.data_ptr())
    return start_on_host(asked, copied, False, lambda: target.to(tensor.device), source, target)


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
