"""Tensors as the engine takes them: contiguous, in host memory, of real numbers or plain bytes."""

from __future__ import annotations

from typing import Any

import torch

from collective_core.torch.tensors import raise_versions


def listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if torch.is_tensor(tensors) else list(tensors)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where the engine can read and write it in place, otherwise a contiguous copy in host memory."""
    plain = tensor.clone() if tensor._is_zerotensor() else tensor  # autograd's zeros have no memory
    return plain.detach().cpu().resolve_conj().resolve_neg().contiguous()


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, without a copy."""
    flat = tensor.detach().reshape(-1)
    # One element is contiguous whatever its stride, and keeps that.
    return (flat.as_strided((1,), (1,)) if flat.numel() == 1 else flat).view(torch.uint8)


def from_bytes(data: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if data.numel() == 0:
        return torch.empty(like.shape, dtype=like.dtype)
    if data.storage_offset() % like.element_size():
        data = data.clone()
    return data.view(like.dtype).view(like.shape)


def length_of(tensor: torch.Tensor) -> int:
    return int(tensor.numel() * tensor.element_size())


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    if target._is_zerotensor() and not source.any():
        return
    with torch.no_grad():
        target.copy_(source)


def copy_back(buffer: torch.Tensor, target: torch.Tensor) -> None:
    """Copies a result to where it belongs, if it is not there."""
    if buffer.data_ptr() == target.data_ptr() and buffer.device == target.device:
        raise_versions((target,))
        return
    copy_into(target, torch.view_as_complex(buffer) if target.is_complex() and not buffer.is_complex() else buffer.view(target.shape))
