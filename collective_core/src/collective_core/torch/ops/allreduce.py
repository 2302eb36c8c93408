"""Allreduce on torch tensors: blocking, in place, asynchronous, in groups, differentiable."""

from __future__ import annotations

import numbers
from typing import Any, Sequence

import torch

from collective_core import _native, arrays
from collective_core.arrays import Average, Max, Min, Product, Sum
from collective_core.lazy import extension
from collective_core.runtime import membership, operations, prepared
from collective_core.runtime.process_sets import members_of
from collective_core.runtime.reductions import Reduction, chosen_op, takes
from collective_core.torch.compiling import not_compiled
from collective_core.torch.compression import Compression
from collective_core.torch.handles import Group, handle_of
from collective_core.torch.ops.fusion import FusedGroup
from collective_core.torch.tensors import (
    EXCHANGE_API,
    PLAIN,
    adopt_again,
    describe,
    dtype_name,
    is_in_host_memory,
    names_of_group,
    new_like,
    raise_versions,
    unsupported_tensor,
)
from collective_core.torch.ways import start

#: The reduction's name, in addition to those of arrays.py (extensions/adasum).
Adasum = "Adasum"

__all__ = ["Adasum", "Average", "Max", "Min", "Product", "Sum"]


def _describe(tensor: torch.Tensor, name: str | None, how: Reduction, fused: int = 0) -> _native.Operation:
    """The reduction of ``tensor``. ``fused``: a checksum of what it is made of."""
    members = members_of(how.process_set)
    known = how.op == Adasum  # which the engine does not see
    problem = "" if known else arrays.unsupported_reduction(how.op, dtype_name(tensor), how.prescale, how.postscale)
    return describe(_native.ALLREDUCE, tensor, name, members.id, problem, **arrays.options_of(how), fused=fused)


def _start(tensor: torch.Tensor, output: torch.Tensor, name: str | None, how: Reduction, blocking: bool = False, fused: int = 0) -> Any:
    """Reduces ``tensor`` into ``output``, which may be the same."""
    asked = _describe(tensor, name, how, fused)
    if output is tensor:
        adopt_again(tensor)

    def combine(source: torch.Tensor, target: torch.Tensor) -> None:
        extension("adasum").combine(tensor, source, target, asked.name.decode(), how.prescale, how.postscale, how.process_set)

    return start(asked, tensor, output, blocking, combine=combine if how.op == Adasum else None)


class _Allreduce(torch.autograd.Function):
    """The gradient of a sum or an average is the same of the gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, how: Reduction) -> torch.Tensor:
        ctx.how = how
        result: torch.Tensor = _start(tensor, new_like(tensor), name, how, blocking=True).result()
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.how.require_gradient("an allreduce")
        return _Allreduce.apply(gradients[0], None, ctx.how), None, None


_FORM = "average name op prescale_factor postscale_factor process_set"
_COMPRESSED_FORM = "average name compression op prescale_factor postscale_factor process_set"


@not_compiled
@takes(_COMPRESSED_FORM, compression=Compression.none)
def allreduce(tensor: torch.Tensor, name: str | None, how: Reduction, compression: Any) -> torch.Tensor:
    """Combines the tensors of all ranks element by element; returns a new tensor. ``op`` is Average unless given.

    The average of integer tensors is rounded towards zero. Differentiable for Sum and Average.
    """
    small, restore = compression.compress(tensor)
    output: torch.Tensor = _Allreduce.apply(small, name, how)
    result: torch.Tensor = compression.decompress(output, restore)
    return result


@not_compiled
@takes(_FORM)
def allreduce_(
    tensor: torch.Tensor, average: Any, name: Any, op: Any, prescale_factor: Any, postscale_factor: Any, process_set: Any
) -> torch.Tensor:
    """:func:`allreduce` into ``tensor`` itself, which is returned. Called again with the same arguments, it costs least."""
    arguments = (average, name, op, prescale_factor, postscale_factor, process_set)
    if not EXCHANGE_API and prepared.is_noted(tensor):  # the engine cannot see itself what the tensor is now
        fault = _native.run_prepared(tensor, *arguments, *_form(tensor))
        if fault:
            operations.check_prepared(fault, tensor)
        if fault is not None:
            raise_versions((tensor,))
            return tensor
    how = Reduction(chosen_op(average, op), prescale_factor, postscale_factor, process_set)
    plain = type(tensor) in PLAIN and tensor.layout is torch.strided and is_in_host_memory(tensor)
    # A prepared call would not see that a complex tensor has been conjugated since.
    if not plain or tensor.is_complex() or not tensor.is_contiguous() or unsupported_tensor(tensor) or how.op == Adasum:
        result: torch.Tensor = _start(tensor, tensor, name, how, blocking=True).result()
        return result
    operation, set_id = _describe(tensor, name, how), members_of(how.process_set).id
    is_decided = adopt_again(tensor)
    operation.input = operation.output = tensor.data_ptr() or None
    operations.run(operation, tensor)
    raise_versions((tensor,))
    # Nor that the value of a factor, which may be a tensor, has changed.
    if is_decided and isinstance(prescale_factor, numbers.Real) and isinstance(postscale_factor, numbers.Real):
        if not name:
            operation.name = membership.name_prefix("allreduce", set_id).encode()
        counter = None if name else membership.counter("allreduce", set_id)
        prepared.note(tensor, (*arguments, *_form(tensor)), operation, counter, EXCHANGE_API, by_front=bool(EXCHANGE_API))
    return tensor


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return () if EXCHANGE_API else (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


if EXCHANGE_API:
    allreduce_ = prepared.front(allreduce_, raise_versions, operations.check_prepared)


@not_compiled
@takes(_FORM)
def allreduce_async(tensor: torch.Tensor, name: str | None, how: Reduction) -> int:
    """Starts an :func:`allreduce` into a new tensor; ``synchronize`` returns it. Do not change ``tensor`` meanwhile."""
    return handle_of(_start(tensor, new_like(tensor), name, how))


@not_compiled
@takes(_FORM)
def allreduce_async_(tensor: torch.Tensor, name: str | None, how: Reduction) -> int:
    """Starts an :func:`allreduce_`. Do not touch ``tensor`` before ``synchronize``."""
    work = _start(tensor, tensor, name, how)
    return handle_of(work)


def _start_group(tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], name: str | None, how: Reduction) -> Group | FusedGroup:
    members, most_bytes = members_of(how.process_set), membership.current().config.fusion_bytes
    if how.op == Adasum or members.size == 1 or len(tensors) < 2:
        return Group([_start(t, o, n, how) for t, o, n in zip(tensors, outputs, names_of_group(name, len(tensors)))])
    chosen = name or membership.next_name("grouped_allreduce", members.id)

    def start_head(flat: torch.Tensor, checksum: int) -> Any:
        return _start(flat, flat, f"{chosen}.fused", how, fused=checksum)

    def start(number: int) -> Any:
        return _start(tensors[number], outputs[number], f"{chosen}.{number}", how)

    return FusedGroup(tensors, outputs, most_bytes, start_head, start)


class _GroupedAllreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, how: Reduction, *tensors: torch.Tensor) -> Any:
        ctx.how = how
        return tuple(_start_group(tensors, [new_like(t) for t in tensors], name, how).result())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.how.require_gradient("an allreduce")
        return None, None, *_GroupedAllreduce.apply(None, ctx.how, *gradients)


@not_compiled
@takes(_COMPRESSED_FORM, compression=Compression.none)
def grouped_allreduce(tensors: Sequence[torch.Tensor], name: str | None, how: Reduction, compression: Any) -> list[torch.Tensor]:
    """:func:`allreduce` of several tensors, all started before the first is waited for; small ones travel as one."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    outputs = _GroupedAllreduce.apply(name, how, *(small for small, _ in pairs)) if pairs else ()
    return [compression.decompress(output, restore) for output, (_, restore) in zip(outputs, pairs)]


@not_compiled
@takes(_FORM)
def grouped_allreduce_(tensors: Sequence[torch.Tensor], name: str | None, how: Reduction) -> list[torch.Tensor]:
    """:func:`allreduce_` of several tensors, all started before the first is waited for."""
    return _start_group(tensors, tensors, name, how).result()


@not_compiled
@takes(_FORM)
def grouped_allreduce_async(tensors: Sequence[torch.Tensor], name: str | None, how: Reduction) -> int:
    """Starts a :func:`grouped_allreduce`; ``synchronize`` returns the list."""
    return handle_of(_start_group(tensors, [new_like(t) for t in tensors], name, how))


@not_compiled
@takes(_FORM)
def grouped_allreduce_async_(tensors: Sequence[torch.Tensor], name: str | None, how: Reduction) -> int:
    """Starts a :func:`grouped_allreduce_`; ``synchronize`` returns the list."""
    return handle_of(_start_group(tensors, tensors, name, how))
