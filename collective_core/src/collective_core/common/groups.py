"""Sums of several arrays as one: a message for each would cost more than what is in it.

The arrays of one type are copied one behind the other into memory of the engine and reduced there in place. A checksum says which they
are, so that it succeeds only where all ranks have the same ones. Where they do not, every rank sends its arrays one by one after all: the
one that differs is found and named.
"""

from __future__ import annotations

import sys
import threading
from typing import Any, Sequence
from zlib import crc32

import numpy as np

from collective_core import _native, arrays
from collective_core.errors import CollectiveError
from collective_core.runtime import membership, operations
from collective_core.runtime.process_sets import Members, members_of
from collective_core.runtime.reductions import Reduction, takes

#: Where an array begins in the memory of its group: frameworks take results over without a copy only where they are aligned so.
ALIGNMENT = 64
#: Bytes from which memory is kept for the next group, because new pages cost more than the sum.
MIN_KEPT = 1 << 16
#: Blocks that are kept while nobody uses them.
MAX_KEPT = 8


class _Memory:
    """Blocks of the engine's memory. One is given out again when no array in it exists any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: list[Any] = []  # the arrays that views of them refer to
        self._generation = 0

    def take(self, length: int) -> Any:
        """So many bytes, uninitialised. Where the engine has none left, ordinary memory."""
        if length < MIN_KEPT:
            return _aligned(length)
        with self._lock:
            if self._generation != membership.generation():
                self._blocks, self._generation = [], membership.generation()
            unused = [number for number, count in enumerate(_references(self._blocks)) if count == _REFERENCES_OF_UNUSED]
            for number in unused:
                if self._blocks[number].nbytes == length:
                    return self._blocks[number]
            if len(unused) >= MAX_KEPT:
                del self._blocks[unused[0]]
            try:
                made = arrays.empty(length, np.uint8)
            except CollectiveError:
                return _aligned(length)
            self._blocks.append(made if made.base is None or not isinstance(made.base, np.ndarray) else made.base)
            return self._blocks[-1]


def _references(blocks: list[Any]) -> list[int]:
    return [sys.getrefcount(block) for block in blocks]


#: Of a block that nothing but the list refers to.
_REFERENCES_OF_UNUSED = _references([np.empty(1)])[0]
_memory = _Memory()


def _aligned(length: int) -> Any:
    memory = np.empty(length + ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    return memory[begin : begin + length]


@takes("name op prescale_factor postscale_factor process_set")
def grouped_allreduce(group: Sequence[Any], name: str | None, how: Reduction) -> list[np.ndarray[Any, Any]]:
    """``arrays.allreduce`` of several arrays, of any types; returns new arrays, aligned to 64 bytes. Those of one type travel as one.

    All ranks pass as many arrays of the same types and shapes in the same order. Otherwise raises :class:`CollectiveError` (kind
    ``mismatch``), which names the first that differs.
    """
    members = members_of(how.process_set)
    chosen = name or membership.next_name("grouped_allreduce", members.id)
    sources = [np.asarray(array, order="C") for array in group]
    checksum = crc32(repr([(source.dtype.name, source.shape) for source in sources]).encode()) or 1
    kinds: dict[str, list[int]] = {}
    apart: list[int] = []
    for number, source in enumerate(sources):
        dtype = source.dtype.name
        impossible = arrays.unsupported_array(source) or arrays.unsupported_reduction(how.op, dtype, how.prescale, how.postscale)
        (apart if impossible else kinds.setdefault(dtype, [])).append(number)
    results: list[Any] = [None] * len(sources)
    try:
        for kind, numbers in enumerate(list(kinds.values()) or [[]]):
            places = _place([sources[number] for number in numbers])
            _reduce_fused(places, f"{chosen}.fused.{kind}", checksum, members, how)
            for number, place in zip(numbers, places):
                results[number] = place
    except CollectiveError as error:
        if not error.has_one_name:  # fatal, or others did something else altogether
            raise
        _compare_numbers(len(sources), f"{chosen}.number", members)
        apart = list(range(len(sources)))
    for number in apart:
        results[number] = arrays.allreduce(sources[number], f"{chosen}.{number}", *how)
    return results


def _compare_numbers(count: int, name: str, members: Members) -> None:
    """Raises where the ranks have different numbers of arrays: the first that one rank does not have would be waited for."""
    operations.run(_native.operation(_native.ALLREDUCE, name, _native.STAND_IN, (0, count), 0, process_set=members.id))


def _place(sources: Sequence[Any]) -> list[Any]:
    """Copies of the arrays, in one block."""
    ends = np.cumsum([-(-source.nbytes // ALIGNMENT) * ALIGNMENT for source in sources]).tolist()
    block = _memory.take(ends[-1] if ends else 0)
    places = []
    for source, end, begin in zip(sources, ends, [0, *ends]):
        places.append(block[begin : begin + source.nbytes].view(source.dtype).reshape(source.shape))
        np.copyto(places[-1], source)
        block[begin + source.nbytes : end] = 0
    return places


def _reduce_fused(places: Sequence[Any], name: str, checksum: int, members: Members, how: Reduction) -> None:
    """Reduces everything from the beginning of the first to the end of the last."""
    dtype, address, count = _native.STAND_IN, 0, 0
    if places:
        first, last = places[0], places[-1]
        dtype, address = first.dtype.name, first.ctypes.data
        count = (last.ctypes.data + last.nbytes - address) // first.itemsize
    operation = _native.operation(_native.ALLREDUCE, name, dtype, (count,), count, address, address)
    operation.reduce, operation.process_set = arrays.reduction_number(how.op) if places else _native.SUM, members.id
    operation.prescale, operation.postscale = (how.prescale, how.postscale) if places else (1.0, 1.0)
    operation.fused = checksum
    operations.run(operation, places)
