"""DDP's reducer, which is C++ and hands a bucket over when that is full.

Where gradients are no views of its buckets only the reducer knows them, so there their memory can be exchanged (torch/memory.py).
"""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from collective_core.torch import memory
from collective_core.torch.handles import can_overlap

#: What runs a backward pass in C++, in PyTorch from 2.1 on.
_backward: Any = getattr(getattr(torch.autograd.graph, "_engine_run_backward", None), "__code__", None)


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
        if memory.times_reduced(bucket) == 2:
            modules = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel) and hasattr(each, "reducer")]
            groups = {module.process_group for module in modules if isinstance(module.process_group, type(group))}
            self.overlap = can_overlap() or groups != {group}
            # What the program knows of a bucket it may know by its address, and may want in a forked child.
            if modules and not any(module.gradient_as_bucket_view for module in modules):
                memory.adopt(bucket)
