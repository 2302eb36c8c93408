"""Timing: every side runs in every round, in turn; the slowest rank's time counts; the median of the rounds is the result."""

from __future__ import annotations

import statistics
import time
from typing import Callable, Sequence

import numpy as np

import collective_core as cc

Step = Callable[[], object]

#: One round of one side lasts about this long: many times the clock's and a barrier's error.
ROUND_SECONDS = 0.04
MOST_CALLS = 2000
WARM_UP = 3


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
    return max(1, min(MOST_CALLS, round(ROUND_SECONDS / max(once, 1e-9))))


def alternate(steps: Sequence[Step], rounds: int, independent: frozenset[int] = frozenset()) -> list[float]:
    """Median seconds per call of each step. In every round another one goes first, so that none always follows the same.

    ``independent``: the steps in which ranks do not wait for each other.
    """
    calls = [calls_per_round(step) for step in steps]
    times: list[list[float]] = [[] for _ in steps]
    for number in range(rounds):
        for turn in range(len(steps)):
            side = (turn + number) % len(steps)
            times[side].append(timed(steps[side], calls[side]) / calls[side])
    return [statistics.median(together(series) if side in independent else slowest(series)) for side, series in enumerate(times)]
