"""Schedule of the parts of a model that train apart for many steps, and the parameters of each part. Pure.

Each of F fragments is synchronised every ``sync_every`` steps, a ``sync_every / F``-th of them after the one before it, so that the network
has about as much to do in every step; one fragment is the whole model. Its sum may go on for ``delay`` steps of training.
Source: Streaming DiLoCo, arXiv 2501.18512.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import NamedTuple, Sequence


class Schedule(NamedTuple):
    """Steps are counted from 1. Made by :func:`schedule`."""

    sync_every: int
    fragments: int
    delay: int

    def next_start(self, fragment: int, step: int) -> int:
        """The first step after ``step`` at whose end the fragment's sum is to start."""
        offset = (fragment + 1) * self.sync_every // self.fragments
        return offset + max(0, -(-(step + 1 - offset) // self.sync_every)) * self.sync_every


def schedule(sync_every: int, fragments: int, delay: int) -> Schedule:
    """Raises ValueError for what cannot be."""
    if sync_every < 1:
        raise ValueError(f"sync_every is the number of steps from one synchronisation to the next: at least 1, not {sync_every}")
    if not 1 <= fragments <= sync_every:
        raise ValueError(f"fragments: from 1 to sync_every ({sync_every}), each of which begins at a step of its own, not {fragments}")
    if not 0 <= delay < sync_every:
        raise ValueError(f"delay: steps for which a sum may go on, at least 0 and below sync_every ({sync_every}), not {delay}")
    return Schedule(sync_every, fragments, delay)


def divide(sizes: Sequence[int], fragments: int) -> list[list[int]]:
    """Numbers of neighbouring parameters, in so many fragments of about equal size. Raises ValueError where there are fewer parameters."""
    if fragments > len(sizes):
        raise ValueError(f"{fragments} fragments of a model with {len(sizes)} trained parameters: at most one of them in each")
    ends, total = [*accumulate(sizes)], sum(sizes)
    cuts = [0]
    for number in range(1, fragments):
        cut = bisect_left(ends, number * total / fragments) + 1
        cuts.append(min(max(cut, cuts[-1] + 1), len(sizes) - fragments + number))  # one parameter at least in each
    return [[*range(begin, end)] for begin, end in zip(cuts, [*cuts[1:], len(sizes)])]
