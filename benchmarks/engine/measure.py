"""Timing: every side runs in every round, in turn; the slowest rank's time counts; the median of the rounds is the result."""

from __future__ import annotations

import ctypes
import time
from typing import Callable, Sequence

import numpy as np

import collective_core as cc

Step = Callable[[], object]

#: One round of one side lasts about this long: many times the clock's and a barrier's error.
ROUND_SECONDS = 0.04
MAX_CALLS = 2000
WARM_UP = 3
#: Of glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Tells the C library to give no freed memory back to the system, where it is glibc.

    All sides share this process: the gradients that one side frees would be given back, and the next would pay for new pages, which took
    100 ms in some steps of a virtual machine. A side in a process of its own allocates what it has just freed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(M_MMAP_THRESHOLD, 32 << 20)


def slowest(seconds: Sequence[float]) -> list[float]:
    """Element by element, the largest of all ranks' times."""
    return [float(t) for t in cc.allreduce(np.array(seconds, dtype=np.float64), op=cc.Max)]


def together(seconds: Sequence[float]) -> list[float]:
    """Element by element, the time per step that the ranks reach together when none waits for another: their speeds' mean."""
    return [1.0 / float(speed) for speed in cc.allreduce(1.0 / np.array(seconds, dtype=np.float64), op=cc.Average)]


def timed(step: Step, calls: int) -> float:
    """Seconds of ``calls`` calls in a row, from a common start."""
    cc.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        step()
    return time.perf_counter() - begin


def calls_per_round(step: Step) -> int:
    """How many calls fill a round; the same on all ranks. Warms the side up."""
    for _ in range(WARM_UP):
        step()
    once = slowest([timed(step, WARM_UP) / WARM_UP])[0]
    return max(1, min(MAX_CALLS, round(ROUND_SECONDS / max(once, 1e-9))))


def alternate(steps: Sequence[Step], rounds: int, independent: frozenset[int] = frozenset()) -> list[list[float]]:
    """Seconds per call of each step, in each round. In every round another one goes first, so that none always follows the same.

    The first rounds do not count: where each side's memory lies settles only when all have run in turn.

    ``independent``: the steps in which ranks do not wait for each other.
    """
    calls = [calls_per_round(step) for step in steps]
    times: list[list[float]] = [[] for _ in steps]
    for number in range(WARM_UP + rounds):
        for turn in range(len(steps)):
            side = (turn + number) % len(steps)
            times[side].append(timed(steps[side], calls[side]) / calls[side])
    times = [series[WARM_UP:] for series in times]
    return [together(series) if side in independent else slowest(series) for side, series in enumerate(times)]
