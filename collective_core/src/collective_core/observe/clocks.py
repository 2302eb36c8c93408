"""Distances of the ranks' clocks: compared when they have met and again at a timeline's end, because clocks also drift."""

from __future__ import annotations

import time
from typing import NamedTuple, Sequence

import numpy as np

from collective_core import arrays
from collective_core.runtime import membership

#: Exchanges that the clocks are compared with: the best one counts.
ROUNDS = 16


class Clock(NamedTuple):
    """Lead of this rank's clock (CLOCK_MONOTONIC) over rank 0's, in nanoseconds, at a moment of its own."""

    at: int
    offset: float


#: Compared in ``init``.
at_start = Clock(0, 0.0)


def offset_of(enters: Sequence[Sequence[int]], leaves: Sequence[Sequence[int]], rank: int) -> float:
    """How far ``rank``'s clock is ahead of rank 0's, from when both entered and left the same exchanges.

    Nobody leaves an exchange before everybody has entered it, which bounds the offset from both sides. Pure.
    """
    least = max(theirs - mine for theirs, mine in zip(enters[rank], leaves[0]))
    most = min(theirs - mine for theirs, mine in zip(leaves[rank], enters[0]))
    return (least + most) / 2


def corrected(moment: int, first: Clock, last: Clock) -> float:
    """A moment of a rank's clock in nanoseconds of rank 0's. The drift between both comparisons is taken as even. Pure."""
    share = (moment - first.at) / (last.at - first.at) if last.at > first.at else 0.0
    return moment - (first.offset + share * (last.offset - first.offset))


def begin() -> None:
    """Compares the clocks for the first time. Collective."""
    global at_start
    at_start = compare("init")


def compare(call: str) -> Clock:
    """This rank's clock beside rank 0's. Collective. ``call``: what every rank has to call now, for errors.

    Ranks of one host have one clock: where there are no others nothing is exchanged.
    """
    who = membership.current()
    if len({peer.host_id for peer in who.peers}) == 1:
        return Clock(time.monotonic_ns(), 0.0)
    enters, leaves = [], []
    for number in range(ROUNDS):
        enters.append(time.monotonic_ns())
        arrays.barrier(f"{call}(), which every rank must call ({number})")
        leaves.append(time.monotonic_ns())
    everyone = arrays.allgather(np.array([[enters, leaves]], dtype=np.int64), f"{call}: clocks")
    offset = 0.0 if who.rank == 0 else offset_of(everyone[:, 0].tolist(), everyone[:, 1].tolist(), who.rank)
    return Clock(time.monotonic_ns(), offset)
