"""The way of an operation on torch tensors: the engine works on them in host memory, where they lie or in a copy.

Tensors of a GPU go another way (torch/gpu.py), which is one of ``tensors.others``.
"""

from __future__ import annotations

from typing import Any, Callable

import torch

from collective_core import _native
from collective_core.runtime import operations
from collective_core.torch.handles import Work
from collective_core.torch.tensors import is_in_host_memory, others, raise_versions, received_tensor

Combine = Callable[[torch.Tensor, torch.Tensor], None]


def start(
    asked: _native.Operation,
    tensor: torch.Tensor,
    output: torch.Tensor,
    blocking: bool,
    is_root: bool | None = None,
    combine: Combine | None = None,
) -> Any:
    """Starts an operation from ``tensor`` into ``output``, which may be the same, and is the result of the work.

    ``asked``: of the engine, without addresses. ``is_root``: of a broadcast, where only the root's tensor is read. ``combine``: does the
    engine's part, in host memory, instead of ``asked``; it blocks.
    """
    for other in others:
        if other.holds(tensor):
            return other.start_tensor(asked, tensor, output, blocking, is_root, combine)
    source = host_values(asked, tensor)
    in_place = not asked.unsupported_reason and is_in_host_memory(output) and output.is_contiguous()
    target = output.detach() if in_place else torch.empty(output.shape, dtype=source.dtype)
    finish = finish_of(tensor, target, output, is_root)
    return begin(asked, source, target, blocking, finish, combine)


def finish_of(
    tensor: torch.Tensor, target: torch.Tensor, output: torch.Tensor, is_root: bool | None, non_blocking: bool = False
) -> Callable[[], torch.Tensor]:
    """What makes ``output`` of ``target``. The engine leaves a root's alone: its result is its own ``tensor``."""
    result = tensor if is_root else target

    def finish() -> torch.Tensor:
        if result is not output and (is_root or target.data_ptr() != output.data_ptr()):
            with torch.no_grad():
                output.copy_(result, non_blocking=non_blocking)
        raise_versions((output,))  # of the root, too: what fails, fails on all ranks
        return output

    return finish


def begin(
    asked: _native.Operation,
    source: torch.Tensor,
    target: torch.Tensor,
    blocking: bool,
    finish: Callable[[], torch.Tensor],
    combine: Combine | None = None,
) -> Work:
    """Has the engine do its part from ``source`` to ``target``, which are contiguous in host memory; ``finish`` makes the result."""
    asked.input, asked.output = source.data_ptr() or None, target.data_ptr() or source.data_ptr() or None
    if combine is not None:
        combine(source, target)
    handle = operations.start(asked, blocking, source, target) if combine is None else 0
    return Work(handle, finish, (source, target, asked))


def start_rows(asked: _native.Operation, tensor: torch.Tensor, blocking: bool, size: int) -> Any:
    """Starts an allgather or alltoall among ``size`` ranks, as :func:`start`.

    The result of the work is the tensor received and the rows from each rank.
    """
    for other in others:
        if other.holds(tensor):
            return other.start_rows(asked, tensor, blocking, size)
    return begin_rows(asked, host_values(asked, tensor), tensor, blocking, size)


def begin_rows(asked: _native.Operation, source: torch.Tensor, tensor: torch.Tensor, blocking: bool, size: int) -> Work:
    """As :func:`begin`; the result is of the type and on the device of ``tensor``."""
    asked.input = source.data_ptr() or None
    handle = _native.submit(asked, _native.BLOCKING if blocking else _native.QUEUED)

    def finish() -> tuple[torch.Tensor, list[int]]:
        buffer, rows = operations.take_received(handle, size)
        return received_tensor(buffer, rows, tensor), rows

    return Work(handle, finish, (source, asked), keeps_handle=True)


def host_values(asked: _native.Operation, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values one after the other in host memory; itself where they are; nothing of one that cannot be sent."""
    return torch.empty(0) if asked.unsupported_reason else tensor.detach().resolve_conj().cpu().resolve_neg().contiguous()
