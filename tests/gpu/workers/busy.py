"""Which GPU is a rank's, and one that is kept busy while work for it is asked for: does the host go on, or does it wait?"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import collective_core.torch as hvd
import torch


def choose_gpu() -> None:
    """Its own with TEST_OWN_GPUS, otherwise the first for all."""
    torch.cuda.set_device(hvd.local_rank() if os.environ.get("TEST_OWN_GPUS") else 0)


def asked_for(work: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, float, float]:
    """What ``work`` returns, the seconds that asking for it took, and those until the GPU was idle. Raises where it was idle first."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    torch.cuda._sleep(2_000_000_000)  # about a second of cycles
    result = work()
    asked = time.perf_counter() - begin
    idle = torch.cuda.Event()
    idle.record()
    busy = not idle.query()
    torch.cuda.synchronize()
    waited = time.perf_counter() - begin
    assert busy, f"asking took {asked:.3f} s, as long as the GPU's own work ({waited:.3f} s): the host has waited for the GPU"
    return result, asked, waited
