"""Horovod's collectives on torch tensors: blocking, in place and asynchronous.

CPU tensors are read and written where they lie; tensors on other devices and non-contiguous ones go through a copy. Functions
that end in ``_`` write into the tensor that they are given. ``allreduce``, ``allgather`` and ``broadcast`` are
differentiable. Asynchronous calls return a handle for :func:`poll` and :func:`synchronize`; ranks may submit named
operations in different orders.
"""

from __future__ import annotations

from typing import Any, Callable

import torch

from collective_core import _native, arrays, context
from collective_core.arrays import Average, Max, Min, Product, Sum
from collective_core.errors import CollectiveError
from collective_core.torch.compression import Compression

#: Named so that scripts that mention it get a clear error and not an AttributeError.
Adasum = "Adasum"

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "poll",
    "synchronize",
]


class _Pending:
    """A submitted operation: the tensors to keep alive and what makes its result."""

    def __init__(self, keep: tuple[Any, ...], finish: Callable[[], torch.Tensor], owns_handle: bool = True) -> None:
        self.keep = keep
        self.finish = finish
        self.owns_handle = owns_handle  # an allgather's handle goes over to its result, which lies in the engine's memory


_pending: dict[int, _Pending] = {}


def dtype_name(tensor: torch.Tensor) -> str:
    """The engine's name of the tensor's element type. Raises :class:`CollectiveError` for one that it cannot send."""
    name = str(tensor.dtype).replace("torch.", "")
    if name not in _native.DTYPES or tensor.layout is not torch.strided:
        raise CollectiveError(f"tensors of {tensor.dtype} with layout {tensor.layout} are not in this version", "invalid")
    return name


def _choose_op(average: bool | None, op: str | None) -> str:
    """Horovod's old ``average=`` and new ``op=``; both at once is an error, neither means Average."""
    if average is not None:
        if op is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        return Average if average else Sum
    return Average if op is None else op


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself when the engine can read it in place, otherwise a contiguous copy in host memory."""
    return tensor.detach().cpu().contiguous()


def _submit(operation: _native.Operation, pending: _Pending) -> int:
    handle = _native.submit(operation)
    _pending[handle] = pending
    return handle


def _start_allreduce(
    tensor: torch.Tensor, output: torch.Tensor, name: str | None, op: str, prescale: float, postscale: float, blocking: bool
) -> int:
    """Reduces ``tensor`` into ``output`` (may be the same). Returns a handle, or 0 when blocking."""
    context.current()
    dtype = dtype_name(tensor)
    number = arrays.reduction_number(op, dtype, prescale, postscale)
    source = _host_copy(tensor)
    in_place = output.device.type == "cpu" and output.is_contiguous()
    target = output.detach() if in_place else torch.empty_like(source)
    operation = _native.operation(
        _native.ALLREDUCE,
        name or context.next_name("allreduce"),
        dtype,
        tuple(tensor.shape),
        source.numel(),
        source.data_ptr(),
        target.data_ptr(),
        reduce=number,
        prescale=prescale,
        postscale=postscale,
    )

    def finish() -> torch.Tensor:
        if not in_place:
            with torch.no_grad():
                output.copy_(target)
        return output

    if blocking:
        arrays.run(operation)
        finish()
        return 0
    return _submit(operation, _Pending((source, target, operation), finish))


class _Allreduce(torch.autograd.Function):
    """The gradient of an allreduce is the allreduce of the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, op: str, prescale: float, postscale: float) -> torch.Tensor:
        ctx.op, ctx.prescale, ctx.postscale = op, prescale, postscale
        output = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        _start_allreduce(tensor, output, name, op, prescale, postscale, blocking=True)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if ctx.op not in (Sum, Average):
            raise CollectiveError(f"the gradient of an allreduce with op={ctx.op} is not in this version", "invalid")
        gradient = allreduce(gradients[0], op=ctx.op, prescale_factor=ctx.prescale, postscale_factor=ctx.postscale)
        return gradient, None, None, None, None


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Combines the tensors of all ranks element by element; returns a new tensor. ``op`` is Average unless given.

    The average of integer tensors is rounded down (``floor_divide``), as in Horovod.
    """
    small, restore = compression.compress(tensor)
    output: torch.Tensor = _Allreduce.apply(small, name, _choose_op(average, op), prescale_factor, postscale_factor)
    result: torch.Tensor = compression.decompress(output, restore)
    return result


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """:func:`allreduce` into ``tensor`` itself, which is returned."""
    _start_allreduce(tensor, tensor, name, _choose_op(average, op), prescale_factor, postscale_factor, blocking=True)
    return tensor


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts an :func:`allreduce` into a new tensor; :func:`synchronize` returns it. Do not change ``tensor`` meanwhile."""
    output = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    return _start_allreduce(tensor, output, name, _choose_op(average, op), prescale_factor, postscale_factor, blocking=False)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts an :func:`allreduce_`. Do not touch ``tensor`` before :func:`synchronize`."""
    return _start_allreduce(tensor, tensor, name, _choose_op(average, op), prescale_factor, postscale_factor, blocking=False)


def grouped_allreduce_(
    tensors: list[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """:func:`allreduce_` of several tensors, all started before the first is waited for."""
    names = [f"{name}.{i}" if name else None for i in range(len(tensors))]
    handles = [allreduce_async_(t, average, n, op, prescale_factor, postscale_factor) for t, n in zip(tensors, names)]
    return [synchronize(handle) for handle in handles]


def grouped_allreduce(
    tensors: list[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """:func:`allreduce` of several tensors, not differentiable."""
    pairs = [compression.compress(tensor.detach().clone()) for tensor in tensors]
    outputs = grouped_allreduce_([small for small, _ in pairs], average, name, op, prescale_factor, postscale_factor)
    return [compression.decompress(output, restore) for output, (_, restore) in zip(outputs, pairs)]


def _start_broadcast(tensor: torch.Tensor, output: torch.Tensor, root_rank: int, name: str | None, blocking: bool) -> int:
    """Writes the root's ``tensor`` into every rank's ``output`` (may be the same). Returns a handle, or 0 when blocking."""
    member = context.current()
    dtype = dtype_name(tensor)
    source = _host_copy(tensor)
    in_place = output.device.type == "cpu" and output.is_contiguous()
    target = output.detach() if in_place else torch.empty_like(source)
    operation = _native.operation(
        _native.BROADCAST,
        name or context.next_name("broadcast"),
        dtype,
        tuple(tensor.shape),
        source.numel(),
        source.data_ptr(),
        target.data_ptr(),
        root=root_rank,
    )

    def finish() -> torch.Tensor:
        with torch.no_grad():
            if member.rank == root_rank:
                if output is not tensor:
                    output.copy_(tensor)
            elif not in_place:
                output.copy_(target)
        return output

    if blocking:
        arrays.run(operation)
        finish()
        return 0
    return _submit(operation, _Pending((source, target, operation), finish))


class _Broadcast(torch.autograd.Function):
    """The gradient of a broadcast is the sum of all ranks' gradients, on the root; zero elsewhere."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None) -> torch.Tensor:
        ctx.root_rank = root_rank
        output = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        _start_broadcast(tensor, output, root_rank, name, blocking=True)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        gradient = allreduce(gradients[0], op=Sum)
        if context.rank() != ctx.root_rank:
            gradient = torch.zeros_like(gradient)
        return gradient, None, None


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """The root's tensor on every rank, as a new tensor."""
    output: torch.Tensor = _Broadcast.apply(tensor, root_rank, name)
    return output


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Overwrites ``tensor`` with the root's, and returns it."""
    _start_broadcast(tensor, tensor, root_rank, name, blocking=True)
    return tensor


def broadcast_async(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> int:
    """Starts a :func:`broadcast`; :func:`synchronize` returns the new tensor."""
    output = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    return _start_broadcast(tensor, output, root_rank, name, blocking=False)


def broadcast_async_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> int:
    """Starts a :func:`broadcast_`."""
    return _start_broadcast(tensor, tensor, root_rank, name, blocking=False)


def _start_allgather(tensor: torch.Tensor, name: str | None, blocking: bool) -> int:
    context.current()
    source = _host_copy(tensor)
    shape = tuple(tensor.shape)
    handle = arrays.submit_allgather(source.data_ptr(), dtype_name(tensor), shape, source.numel(), name, blocking)

    def finish() -> torch.Tensor:
        buffer, rows = arrays.take_gathered(handle)
        whole = (sum(rows), *shape[1:])
        if not buffer.size:
            return torch.empty(whole, dtype=tensor.dtype, device=tensor.device)
        return torch.from_numpy(buffer).view(tensor.dtype).reshape(whole).to(tensor.device)

    _pending[handle] = _Pending((source,), finish, owns_handle=False)
    return handle


class _Allgather(torch.autograd.Function):
    """The gradient of an allgather is this rank's part of the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None) -> torch.Tensor:
        ctx.rows = tensor.shape[0] if tensor.dim() else 0
        return synchronize(_start_allgather(tensor, name, blocking=True))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        total = allreduce(gradients[0], op=Sum)
        rows = allgather(torch.tensor([ctx.rows]))
        begin = int(rows[: context.rank()].sum())
        return total[begin : begin + ctx.rows], None


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """All ranks' tensors one after the other along the first dimension, which may differ between ranks."""
    output: torch.Tensor = _Allgather.apply(tensor, name)
    return output


def allgather_async(tensor: torch.Tensor, name: str | None = None) -> int:
    """Starts an :func:`allgather`; :func:`synchronize` returns the new tensor."""
    return _start_allgather(tensor, name, blocking=False)


def poll(handle: int) -> bool:
    """Whether the operation is done, so that :func:`synchronize` will not wait."""
    return _native.is_done(handle)


def synchronize(handle: int) -> torch.Tensor:
    """Waits for the operation and returns its tensor. Raises :class:`CollectiveError` if it failed."""
    if handle not in _pending:
        raise CollectiveError(f"handle {handle} is unknown or has been synchronized already", "invalid")
    pending = _pending.pop(handle)
    arrays.wait_and_release_on_error(handle)
    result = pending.finish()
    if pending.owns_handle:
        _native.release(handle)
    return result


def barrier(process_set: Any | None = None) -> None:
    """Returns when every rank has called it."""
    if process_set is not None:
        raise CollectiveError("process sets are not in this version", "invalid")
    arrays.barrier()
