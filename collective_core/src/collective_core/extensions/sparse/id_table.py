"""Table of known ids and their counts: a hash table of NumPy arrays, whose lookups and additions are of many ids at once."""

from __future__ import annotations

from typing import Any

import numpy as np

Ids = Any  # an array of int64

#: Places per id, at least: with half of them free a search looks at two on average.
PLACES_PER_ID = 2
FEWEST_PLACES = 1 << 10


class IdTable:
    """Distinct ids of int64 that are spread already (hashing.mixed), each with an entry: a number below ``len``.

    By entry, ``ids``, how often each has occurred (``counts``), the step in which it was used last (``used``), and its row, -1 for an id
    that has none (``rows``).
    """

    def __init__(self) -> None:
        self.ids = np.empty(0, np.int64)
        self.counts = np.empty(0, np.int64)
        self.used = np.empty(0, np.int64)
        self.rows = np.empty(0, np.int64)
        self._entry_at = np.full(FEWEST_PLACES, -1, np.int64)

    def __len__(self) -> int:
        return len(self.ids)

    def find(self, ids: Ids) -> Ids:
        """The entry of each id, -1 for those that are unknown."""
        entries = np.full(len(ids), -1, np.int64)
        open_ = np.arange(len(ids))
        places = ids & (len(self._entry_at) - 1)
        while len(open_):
            found = self._entry_at[places]
            # An unknown id's search ends at a free place.
            taken = found >= 0
            hit = taken.copy()
            hit[taken] = self.ids[found[taken]] == ids[open_[taken]]
            entries[open_[hit]] = found[hit]
            on = taken & ~hit
            open_, places = open_[on], (places[on] + 1) & (len(self._entry_at) - 1)
        return entries

    def add(self, ids: Ids, step: int) -> Ids:
        """Makes entries for ids that are distinct and unknown; returns them."""
        first = len(self.ids)
        self.ids = np.concatenate([self.ids, ids])
        self.counts = np.concatenate([self.counts, np.zeros(len(ids), np.int64)])
        self.used = np.concatenate([self.used, np.full(len(ids), step, np.int64)])
        self.rows = np.concatenate([self.rows, np.full(len(ids), -1, np.int64)])
        entries = np.arange(first, len(self.ids))
        if len(self.ids) * PLACES_PER_ID > len(self._entry_at):
            self._place_all()
        else:
            self._place(entries)
        return entries

    def keep(self, is_kept: Any) -> None:
        """Forgets all entries but these; those that stay are renumbered."""
        self.ids, self.counts, self.used, self.rows = (values[is_kept] for values in (self.ids, self.counts, self.used, self.rows))
        self._place_all()

    def _place_all(self) -> None:
        places = FEWEST_PLACES
        while places < 2 * PLACES_PER_ID * len(self.ids):
            places *= 2
        self._entry_at = np.full(places, -1, np.int64)
        self._place(np.arange(len(self.ids)))

    def _place(self, entries: Ids) -> None:
        places = self.ids[entries] & (len(self._entry_at) - 1)
        while len(entries):
            free = self._entry_at[places] < 0
            # Of several that want one place, the last to write has it.
            self._entry_at[places[free]] = entries[free]
            on = self._entry_at[places] != entries
            entries, places = entries[on], (places[on] + 1) & (len(self._entry_at) - 1)
