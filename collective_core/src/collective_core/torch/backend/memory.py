"""Tensors in the memory that the ranks of a host share, which the others read and reduce where they lie.

FSDP2 asks for its buffers (``CollectiveGroup.allocate_tensor``). DDP does not ask: its reducer, which is C++, hands a bucket over when that
is full. Where gradients are no views of them only the reducer knows its buckets, so there their memory can be exchanged for a block of the
engine's.
"""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from collective_core import _native, arrays
from collective_core.errors import CollectiveError
from collective_core.runtime import membership
from collective_core.torch.handles import can_overlap

#: Bytes of a bucket that is worth a block of its own; smaller ones travel with their headers or stay in a cache.
MIN_BUCKET = 64 << 10

#: Addresses of the blocks that tensors have.
_blocks: set[int] = set()
#: Tensors that the reducer has handed over, by id, and whether it has been decided where they lie: at the second time, as some are new
#: at each.
_seen: dict[int, tuple[weakref.ref[torch.Tensor], bool]] = {}
#: What runs a backward pass in C++, in PyTorch from 2.1 on.
_backward: Any = getattr(getattr(torch.autograd.graph, "_engine_run_backward", None), "__code__", None)


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


def is_of_reducer() -> bool:
    """Whether a collective is called by C++ in a backward pass: no Python is between them, as it is where a program calls one."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("collective_core."):
        frame = frame.f_back
    return frame.f_code is _backward


class Reducers:
    """DDP's modules over a group, as they are when one of its buckets is reduced for the second time."""

    def __init__(self) -> None:
        #: Whether a sum is to go on beside the backward pass: not where that cannot save time. Of several groups with modules the ranks
        #: may fill the buckets in different orders, so that none may wait for its sum.
        self.overlap = True

    def take(self, group: Any, bucket: torch.Tensor) -> None:
        """Decides, at the second reduction of a bucket, whether its memory is exchanged, and whether sums overlap."""
        seen, is_decided = _seen.get(id(bucket), (None, False))
        if seen is None or seen() is not bucket:
            key = id(bucket)
            _seen[key] = weakref.ref(bucket, lambda _: _seen.pop(key, None)), False
        elif not is_decided:
            _seen[id(bucket)] = seen, True
            modules = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel) and hasattr(each, "reducer")]
            groups = {module.process_group for module in modules if isinstance(module.process_group, type(group))}
            self.overlap = can_overlap() or groups != {group}
            # What the program knows of a bucket it may know by its address, and may want in a forked child.
            if modules and not any(module.gradient_as_bucket_view for module in modules):
                _adopt(bucket)


def _adopt(bucket: torch.Tensor) -> None:
    """Exchanges a bucket's memory for a block of the engine's; not where no other rank of the host reads it, nor before PyTorch 2.13."""
    length = bucket.numel() * bucket.element_size()
    if bucket.layout is not torch.strided or not bucket.is_cpu or length < MIN_BUCKET or membership.current().local_size == 1:
        return
    storage: Any = bucket.untyped_storage()
    # One that cannot be resized is something else's, as NumPy's.
    if not hasattr(storage, "_swap_data_ptr_") or not bucket.is_contiguous() or storage.nbytes() != length or not storage.resizable():
        return
    with torch.no_grad():
        block = allocate(bucket.numel(), bucket.dtype)
        if block.data_ptr() in _blocks:
            storage._swap_data_ptr_(block.copy_(bucket.detach().view(-1)).untyped_storage())
