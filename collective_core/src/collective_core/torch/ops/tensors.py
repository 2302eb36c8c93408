"""What every collective on torch tensors needs: types, places, copies."""

from __future__ import annotations

from typing import Any

import torch

from collective_core import _native
from collective_core.errors import CollectiveError


def dtype_name(tensor: torch.Tensor) -> str:
    """The engine's name of the tensor's element type. Raises :class:`CollectiveError` for one that it cannot send."""
    name = str(tensor.dtype).replace("torch.", "")
    if name not in _native.DTYPES or tensor.layout is not torch.strided:
        raise CollectiveError(f"tensors of {tensor.dtype} with layout {tensor.layout} cannot be sent", "invalid")
    return name


def device_number(tensor: torch.Tensor) -> int:
    """The engine's number of where the tensor lies: all ranks must use the same."""
    return 0 if tensor.device.type == "cpu" else 1


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself when the engine can read it in place, otherwise a contiguous copy in host memory."""
    return tensor.detach().cpu().contiguous()


def new_like(tensor: torch.Tensor) -> torch.Tensor:
    """An uninitialised, contiguous tensor of the same shape, type and device."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def names_of_group(name: str | None, count: int) -> list[str | None]:
    """The names of a group's members."""
    return [f"{name}.{i}" if name else None for i in range(count)]


def received_tensor(buffer: Any, rows: list[int], like: torch.Tensor) -> torch.Tensor:
    """The engine's bytes as a tensor of ``sum(rows)`` rows of the shape, type and device of ``like``."""
    shape = (sum(rows), *like.shape[1:])
    if not buffer.size:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    return torch.from_numpy(buffer).view(like.dtype).reshape(shape).to(like.device)
