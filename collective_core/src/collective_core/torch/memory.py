"""Tensors in the memory that the ranks of a host share, which the others read and reduce where they lie.

FSDP2 asks for its buffers (``CollectiveGroup.allocate_tensor``). The memory of others is exchanged for a block of the engine's: of DDP's
buckets (torch/backend/reducers.py), and where the program allows it (COLLECTIVE_ADOPT_TENSORS) of tensors that it reduces again.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from collective_core import _native, arrays
from collective_core.errors import CollectiveError
from collective_core.runtime import membership

#: Bytes of a bucket that is worth a block of its own; smaller ones travel with their headers or stay in a cache.
MIN_BUCKET = 64 << 10

#: Addresses of the blocks that tensors have.
_blocks: set[int] = set()
#: Tensors that have been reduced, by id, and how often; where they lie is decided at the second time, as some are new at each.
_seen: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}


def allocate(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised vector in the engine's memory, which goes back with the last view; in ordinary memory where that is full."""
    ordinary = torch.empty(elements, dtype=dtype, device="cpu")
    try:
        block = arrays.block(elements * ordinary.element_size(), _native.KEPT_PAGES)
    except CollectiveError:  # also in a forked child, and after the job's end
        block = None
    if block is None:
        return ordinary
    tensor = torch.frombuffer(block, dtype=dtype)
    _blocks.add(tensor.data_ptr())
    weakref.finalize(block, _blocks.discard, tensor.data_ptr()).atexit = False
    return tensor


def times_reduced(tensor: torch.Tensor) -> int:
    """How often the tensor has been reduced, with this time: 1, 2 or 3, which is more often."""
    key = id(tensor)
    seen, times = _seen.get(key, (None, 0))
    if seen is None or seen() is not tensor:
        seen, times = weakref.ref(tensor, lambda _: _seen.pop(key, None)), 0
    times = min(times + 1, 3)
    _seen[key] = seen, times
    return times


def adopt(tensor: torch.Tensor) -> None:
    """Exchanges a tensor's memory for a block of the engine's; not where no other rank of the host reads it, nor before PyTorch 2.13."""
    length = tensor.numel() * tensor.element_size()
    if tensor.layout is not torch.strided or not tensor.is_cpu or length < MIN_BUCKET or membership.current().local_size == 1:
        return
    storage: Any = tensor.untyped_storage()
    # One that cannot be resized is something else's, as NumPy's; and other processes may have shared and pinned ones in hand.
    is_own = storage.resizable() and not storage.is_shared() and not tensor.is_pinned()
    if not hasattr(storage, "_swap_data_ptr_") or storage.nbytes() != length or not is_own:
        return
    block = allocate(length, torch.uint8)
    if block.data_ptr() in _blocks:
        storage._swap_data_ptr_(block.copy_(torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)).untyped_storage())
