"""Rows in a file that memory has no room for, and a cache of those in use: a table that is larger than memory.

Each row is one record of fixed size, so its place follows from its number and nothing needs to be looked up. The system's own cache holds
pages of 4 KiB, of which rows in use that lie scattered have a page each, where a record has 128 bytes or so. So there is a second cache, of
records: set-associative, the least recently used of a set makes room, as GPUs' caches of rows in FBGEMM. Changed records go to the file
when they make room, or with :meth:`RowFile.flush`.

Records that are not cached are read by several threads: a disk needs many requests at a time, and each of a thread's waits for the last.
"""

from __future__ import annotations

import functools
import mmap
import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

Array = Any  # numpy's, as records: rows x numbers; as rows and slots: of int64

#: Slots of a set. With more of them fewer rows in use are pushed out, and finding one takes longer.
WAYS = 16
#: Of a slot, beside its record: which row it has, when that was used, and whether it was changed.
BYTES_PER_SLOT = 8 + 8 + 1
#: Requests that a disk has at a time.
READERS = 16
#: Rows that a thread reads at once, at least: fewer cost less than another thread.
FEWEST_ROWS = 16
#: Of records that are brought to the file at once: flushing takes two or three times as much memory beside the cache.
FLUSHED_BYTES = 4 << 20


@functools.lru_cache(maxsize=None)
def _readers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(READERS, "collective_core.rows")


os.register_at_fork(after_in_child=_readers.cache_clear)  # a child has none of its parent's threads


class RowFile:
    """Zeros at first. The file has no name, and so ends with the process. Threads may share it.

    ``whole``: all records, mapped; true after :meth:`flush`, and to be written to after :meth:`clear`, until the next call.

    Args:
        folder: on a local disk.
        shape: rows, and numbers of each.
        cache_bytes: of memory for rows in use; 0 leaves caching to the system.

    Raises OSError where the folder cannot be written to or has no room for all rows: it is taken now, because a disk that is full later
    would end the process with a signal.
    """

    def __init__(self, folder: str | os.PathLike[str], shape: tuple[int, int], dtype: Any, cache_bytes: int) -> None:
        length = shape[0] * shape[1] * np.dtype(dtype).itemsize
        number, path = tempfile.mkstemp(prefix=".rows-", dir=folder)
        try:
            os.unlink(path)
            os.posix_fallocate(number, 0, length)
            # Two mappings of the same pages. Whoever goes through all rows wants them read ahead, which is up to megabytes for each row of
            # those that are scattered.
            self.whole: Array = np.frombuffer(mmap.mmap(number, length), dtype).reshape(shape)
            scattered = mmap.mmap(number, length)
            scattered.madvise(mmap.MADV_RANDOM)
            self._scattered: Array = np.frombuffer(scattered, dtype).reshape(shape)
        finally:
            os.close(number)
        per_slot = shape[1] * self.whole.itemsize + BYTES_PER_SLOT
        #: Sets that all rows would fill, or less. Memory is taken when a slot is used first.
        self._sets = min(cache_bytes // (WAYS * per_slot), -(-shape[0] // WAYS))
        slots = self._sets * WAYS
        self._cached: Array = np.zeros((slots, shape[1]), dtype)
        self._row_in: Array = np.full(slots, -1, np.int64)
        self._used: Array = np.zeros(slots, np.int64)
        self._is_changed: Array = np.zeros(slots, bool)
        #: Reads and writes since the cache was empty.
        self._call = 0
        self._lock = threading.Lock()

    def read(self, rows: Array) -> Array:
        """Copies of the records of distinct rows. Raises IndexError for a row that the file has not."""
        with self._lock:
            return self._read(self._checked(rows))

    def write(self, rows: Array, records: Array) -> None:
        """Changes the records of distinct rows. Raises IndexError for a row that the file has not."""
        with self._lock:
            self._write(self._checked(rows), records)

    def flush(self) -> None:
        """Brings changed records to the file."""
        with self._lock:
            self._flush()

    def clear(self) -> None:
        """And forgets them."""
        with self._lock:
            if self._call:
                self._flush()
                self._row_in.fill(-1)
                self._used.fill(0)
                self._call = 0

    def _checked(self, rows: Array) -> Array:
        if len(rows) and not 0 <= rows.min() <= rows.max() < len(self.whole):
            raise IndexError(f"rows {rows.min()} to {rows.max()} are out of range: there are {len(self.whole)}")
        return rows

    # --- the cache

    def _read(self, rows: Array) -> Array:
        slots = self._slots(rows)
        outside = slots < 0
        if not outside.any():
            return self._cached.take(slots, 0)
        found = np.empty((len(rows), self.whole.shape[1]), self.whole.dtype)
        found[~outside] = self._cached[slots[~outside]]
        found[outside] = self._read_file(rows[outside])
        return found

    def _write(self, rows: Array, records: Array) -> None:
        slots = self._slots(rows)
        outside = slots < 0
        self._cached[slots[~outside]] = records[~outside]
        self._is_changed[slots[~outside]] = True
        self._write_file(rows[outside], records[outside])

    def _flush(self) -> None:
        changed = np.flatnonzero(self._is_changed)
        changed = changed[np.argsort(self._row_in[changed])]
        each = FLUSHED_BYTES // max(self._cached[:1].nbytes, 1) + 1
        for begin in range(0, len(changed), each):
            slots = changed[begin : begin + each]
            self._write_file(self._row_in[slots], self._cached[slots])
        self._is_changed[changed] = False

    def _slots(self, rows: Array) -> Array:
        """Where each row is in the cache, which takes in those that it has not; -1 for those that find no place beside the others."""
        if not self._sets:
            return np.full(len(rows), -1, np.int64)
        self._call += 1
        sets = rows % self._sets
        is_here = self._row_in.reshape(-1, WAYS)[sets] == rows[:, None]
        slots = sets * WAYS + is_here.argmax(1)
        missing = np.flatnonzero(~is_here.any(1))
        self._used[np.delete(slots, missing)] = self._call
        slots[missing] = self._take_in(rows[missing], sets[missing])
        return slots

    def _take_in(self, rows: Array, sets: Array) -> Array:
        order = np.argsort(sets, kind="stable")
        rows, sets = rows[order], sets[order]
        # Of several that want a place in one set the first has the slot that was not used for longest, the second the next.
        turns = np.arange(len(sets)) - np.searchsorted(sets, sets)
        used = self._used.reshape(-1, WAYS)[sets]
        ways = used.argsort(1, kind="stable")[np.arange(len(sets)), np.minimum(turns, WAYS - 1)]
        slots = sets * WAYS + ways
        fits = (turns < WAYS) & (self._used[slots] < self._call)
        rows, taken = rows[fits], slots[fits]
        leaving = taken[self._is_changed[taken]]
        self._write_file(self._row_in[leaving], self._cached[leaving])
        self._cached[taken] = self._read_file(rows)
        self._row_in[taken], self._used[taken], self._is_changed[taken] = rows, self._call, False
        found = np.full(len(order), -1, np.int64)
        found[order[fits]] = taken
        return found

    # --- the file

    def _read_file(self, rows: Array) -> Array:
        found = np.empty((len(rows), self.whole.shape[1]), self.whole.dtype)
        each = max(-(-len(rows) // READERS), FEWEST_ROWS)

        def read(begin: int) -> None:
            part = slice(begin, begin + each)
            self._scattered.take(rows[part], 0, found[part], "clip")  # which lets other threads run, and makes no copy between

        list(_readers().map(read, range(0, len(rows), each)))
        return found

    def _write_file(self, rows: Array, records: Array) -> None:
        """A page that is not in memory is read before a part of it is written: all at a time."""
        self._read_file(rows)
        self._scattered[rows] = records
