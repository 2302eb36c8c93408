"""Answers to what Horovod's programs ask about how it was built."""

from __future__ import annotations

import torch

from collective_core.runtime.process_sets import ProcessSet
from collective_core.torch import gpu, nccl


def nccl_built() -> int:
    """The version of PyTorch's NCCL, as 22005 for 2.20.5; 0 if it has none."""
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return 0
    major, minor, patch = nccl.platform.version()
    return 10000 * major + 100 * minor + patch


def nccl_enabled(process_set: ProcessSet | None = None) -> bool:
    """Whether CUDA tensors of this process set (the job's) go through NCCL; before its first, whether this rank has what it takes."""
    return gpu.is_used(process_set)


def cuda_built() -> bool:
    """Whether CUDA tensors can be sent: PyTorch was built for CUDA."""
    return torch.version.cuda is not None
