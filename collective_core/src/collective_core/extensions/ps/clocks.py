"""Clocks of workers: how many updates each has sent, and whether one has to wait for others: stale synchronous parallel.

Source: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013. A worker that has sent c
updates may read when every other has sent at least c - ``staleness``: it then sees all updates but the last ``staleness`` of each worker.
0 is synchronous, None has no bound.
"""

from __future__ import annotations

from typing import Collection, Sequence


def check_staleness(staleness: int | None) -> None:
    """Raises ValueError for what is no bound."""
    if staleness is not None and (isinstance(staleness, bool) or not isinstance(staleness, int) or staleness < 0):
        raise ValueError(f"staleness={staleness!r} is not possible: write a number of steps from 0 (synchronous), or None for no bound")


class Clocks:
    """Clocks of one array. ``active``: the workers that have not ended; it is shared with others and changes."""

    def __init__(self, workers: Sequence[int], active: Collection[int], staleness: int | None) -> None:
        check_staleness(staleness)
        self.staleness = staleness
        self._sent = dict.fromkeys(workers, 0)
        self._active = active

    def tick(self, worker: int) -> int:
        """The worker has sent an update; its number, from 1."""
        self._sent[worker] += 1
        return self._sent[worker]

    def waits_for(self, worker: int) -> list[int]:
        """The workers that must send something before this one may read."""
        if self.staleness is None:
            return []
        least = self._sent[worker] - self.staleness
        return [other for other in sorted(self._active) if self._sent[other] < least]

    def complete_rounds(self) -> int:
        """How many updates every worker has sent that has not ended."""
        return min((self._sent[worker] for worker in self._active), default=max(self._sent.values(), default=0))
