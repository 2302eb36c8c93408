"""Membership of an elastic job, and when those who are there make a new generation of ranks. Pure: no sockets, no clock."""

from __future__ import annotations

from typing import NamedTuple


class RankAssignment(NamedTuple):
    """A worker's rank in a generation, and how many ranks that has."""

    worker: int
    rank: int
    size: int


class ElasticMembership:
    """The workers of a job, by their number; a lower one has been there for longer. Times are seconds of any clock that does not go back.

    ``fewest``: ranks without which the job waits. ``begin``: ranks without which it does not begin while ``patience`` lasts, seconds from
    the first start of a worker; so long it also waits for all others that were started, who would else change the ranks again at once.
    ``gathering``: seconds for which newcomers wait for those that were started with them, for the same reason, while the others work.
    ``suspicion``: seconds for which one is waited for that the others have lost, but that has not gone yet: it may be busy with the end
    of its own work.
    """

    def __init__(self, fewest: int, patience: float, suspicion: float = 30.0, begin: int = 1, gathering: float = 30.0) -> None:
        self.generation = 0
        self._fewest = fewest
        self._patience = patience
        self._suspicion = suspicion
        self._begin = begin
        self._gathering = gathering
        self._host_of: dict[int, str] = {}
        self._ready: set[int] = set()
        self._by_rank: list[int] = []  # by rank, of the generation that works now
        self._suspected: dict[int, float] = {}  # until when they may still come
        self._opened: float | None = None
        self._newcomers: dict[int, float] = {}  # since when they wait to join
        self.leaving: set[int] = set()
        self.closed = False  # some have finished: nobody new may join, who would begin the work again
        self._slot_of: dict[int, int] = {}

    def start(self, worker: int, host: str, now: float, slot: int = 0) -> None:
        """A worker was started in a slot of a host; it has not come yet."""
        self._host_of[worker] = host
        self._slot_of[worker] = slot
        self._opened = now if self._opened is None else self._opened

    def come(self, worker: int, now: float, lost: tuple[int, ...] = ()) -> None:
        """A worker asks for its rank: for the first time, or again because the generation ended for it. ``lost``: ranks it blames."""
        if worker not in self._host_of:
            return
        self._ready.add(worker)
        self._suspected.pop(worker, None)
        if worker not in self._by_rank:
            self._newcomers.setdefault(worker, now)
        else:
            for rank in lost:
                if rank < len(self._by_rank) and self._by_rank[rank] not in self._ready:
                    self._suspected.setdefault(self._by_rank[rank], now + self._suspicion)

    def lose(self, worker: int, now: float, patience: float = 5.0) -> None:
        """The control channel of a worker is gone; its process's end will tell, or it must be ended."""
        if worker in self._host_of:
            self._ready.discard(worker)
            self._suspected[worker] = min(self._suspected.get(worker, now + patience), now + patience)

    def go(self, worker: int) -> None:
        """A worker is gone."""
        for known in (self._host_of, self._suspected, self._newcomers):
            known.pop(worker, None)
        self._ready.discard(worker)
        self.leaving.discard(worker)

    def send_away(self, worker: int) -> None:
        """The worker's slot is no longer the job's: it is in no later generation."""
        if worker in self._host_of:
            self.leaving.add(worker)

    def overdue(self, now: float) -> list[int]:
        """Workers that the others have lost and that have not come or gone in time: their hosts may be."""
        return [worker for worker, until in self._suspected.items() if now >= until]

    @property
    def workers(self) -> dict[int, str]:
        """Worker → host, of all that have been started and are not gone."""
        return dict(self._host_of)

    @property
    def working(self) -> list[int]:
        """The workers of the generation that works now and are not gone, by rank."""
        return [worker for worker in self._by_rank if worker in self._host_of]

    @property
    def is_working(self) -> bool:
        """Whether the generation still works: not all of its members have come back or gone."""
        return bool(set(self.working) - self._ready)

    def slots_of(self, host: str) -> dict[int, int]:
        """Slot → worker, of those of a host that are to stay."""
        return {self._slot_of[each]: each for each, there in self._host_of.items() if there == host and each not in self.leaving}

    def should_change(self, now: float) -> bool:
        """Whether the generation that works now should end at its next chance: somebody has to leave it, or newcomers wait to join it."""
        working = set(self.working) - self._ready
        if self.closed or not working:
            return False
        waiting = [since for worker, since in self._newcomers.items() if worker in self._ready - self.leaving]
        gathered = not self._on_their_way or (bool(waiting) and now >= min(waiting) + self._gathering)
        return bool(working & self.leaving) or (bool(waiting) and gathered)

    @property
    def _on_their_way(self) -> set[int]:
        """Workers that were started and have not come for the first time."""
        return set(self._host_of) - set(self._newcomers) - set(self._by_rank) - self.leaving

    def waits_for(self) -> int:
        """How many workers more it would take to go on; 0 when there are enough."""
        return max(0, self._fewest - len(self._ready - self.leaving))

    def form(self, now: float) -> list[RankAssignment]:
        """The ranks of a new generation, or none while it is not time for one.

        It is when all that worked in the last one have come or gone and there are enough; before the first one, also all that were
        started, and as many as it is to begin with, for as long as patience lasts. Hosts stand together, those that have been there for
        longest first; on a host the order is that of the slots, so that a worker's local rank stays as far as it can.
        """
        ready = self._ready - self.leaving
        if self.closed:
            ready &= set(self._by_rank)
        if len(ready) < self._fewest or not ready:
            return []
        if set(self.working) - self._ready:
            return []
        patient = self.generation == 0 and self._opened is not None and now < self._opened + self._patience
        if patient and (self._on_their_way or len(ready) < self._begin):
            return []
        oldest: dict[str, int] = {}
        for worker in sorted(ready):
            oldest.setdefault(self._host_of[worker], worker)
        self._by_rank = sorted(ready, key=lambda worker: (oldest[self._host_of[worker]], self._slot_of[worker], worker))
        self._ready -= ready
        self._newcomers.clear()
        self.generation += 1
        return [RankAssignment(worker, rank, len(self._by_rank)) for rank, worker in enumerate(self._by_rank)]

    def dismissed(self) -> list[int]:
        """Workers that have come and are to leave; each is named once."""
        found = sorted(self._ready & self.leaving)
        self._ready -= self.leaving
        return found
