"""Which calls of NCCL carry what the ranks have agreed on. Pure: every rank finds the same order of calls by itself.

Rows that are dealt out evenly have a call of NCCL's own. Uneven ones go as a group of calls, which NCCL runs as one: an allgather as a
broadcast from every rank, a reducescatter as a reduction to every rank. An alltoall is sends and receives, also from a rank to itself.
What is moved and not summed goes as bytes, so its element type does not matter. A rank that has joined makes the same calls as the others.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Iterator, Sequence

from collective_core import _native
from collective_core.transport import nccl

_BYTE = nccl.TYPES["uint8"]
_TYPES = {number: nccl.TYPES[name] for name, number in _native.DTYPES.items() if name in nccl.TYPES}
REDUCTIONS = {
    _native.SUM: nccl.SUM,
    _native.AVERAGE: nccl.SUM,  # the division is ours (`factors`): ranks that have joined do not count
    _native.PRODUCT: nccl.PRODUCT,
    _native.MIN: nccl.MIN,
    _native.MAX: nccl.MAX,
}


@dataclass(frozen=True)
class Agreed:
    """A transfer as the engine tells a rank of it (struct cc_transfer of csrc/api/c_api.h), which may be kept."""

    kind: int
    dtype: int
    reduce: int
    root: int
    contributors: int
    tag: int
    count: int
    row_bytes: int
    sent: Sequence[int]  # alltoall: rows for each rank; reducescatter: rows that each rank keeps; otherwise empty
    received: Sequence[int]  # allgather, alltoall: rows from each rank; otherwise empty


_NUMBERS = ("kind", "dtype", "reduce", "root", "contributors", "tag", "count", "row_bytes")


def agreed(transfer: _native.Transfer, size: int) -> Agreed:
    """Copies what the engine tells a rank of a process set of ``size`` ranks."""
    sent, received = (rows[:size] if rows else [] for rows in (transfer.sent, transfer.received))
    numbers: dict[str, Any] = {name: getattr(transfer, name) for name in _NUMBERS}
    return Agreed(**numbers, sent=sent, received=received)


def calls(asked: Agreed) -> list[nccl.Call]:
    """The calls of this rank, to be made as one group."""
    if asked.kind == _native.ALLREDUCE:
        return [nccl.Call("ncclAllReduce", asked.count, _TYPES[asked.dtype], reduction=REDUCTIONS[asked.reduce])]
    if asked.kind == _native.BROADCAST:
        return [nccl.Call("ncclBroadcast", asked.count, _BYTE, peer=asked.root)]
    if asked.kind == _native.REDUCESCATTER:
        return _reducescatter(asked)
    if asked.kind == _native.ALLGATHER:
        return _allgather(asked)
    return _alltoall(asked)


def factors(asked: Agreed, prescale: float, postscale: float) -> tuple[float, float]:
    """What each input is multiplied by before the calls, and the result after them.

    NCCL adds float16 in float16, where a sum can overflow though the average does not: its inputs are divided, not the sum.
    """
    if asked.reduce != _native.AVERAGE:
        return prescale, postscale
    if asked.dtype == _native.DTYPES["float16"]:
        return prescale / asked.contributors, postscale
    return prescale, postscale / asked.contributors


def _reducescatter(asked: Agreed) -> list[nccl.Call]:
    dtype, reduction, row = _TYPES[asked.dtype], REDUCTIONS[asked.reduce], asked.count // sum(asked.sent)
    if len(set(asked.sent)) == 1:
        return [nccl.Call("ncclReduceScatter", asked.sent[0] * row, dtype, reduction=reduction)]
    return [
        nccl.Call("ncclReduce", rows * row, dtype, source=begin * asked.row_bytes, reduction=reduction, peer=root)
        for root, begin, rows in _parts(asked.sent)
    ]


def _allgather(asked: Agreed) -> list[nccl.Call]:
    width = asked.row_bytes
    if len(set(asked.received)) == 1:
        return [nccl.Call("ncclAllGather", asked.received[0] * width, _BYTE)]
    return [
        nccl.Call("ncclBroadcast", rows * width, _BYTE, target=begin * width, peer=root) for root, begin, rows in _parts(asked.received)
    ]


def _alltoall(asked: Agreed) -> list[nccl.Call]:
    width = asked.row_bytes
    sends = [nccl.Call("ncclSend", rows * width, _BYTE, source=begin * width, peer=peer) for peer, begin, rows in _parts(asked.sent)]
    receives = [nccl.Call("ncclRecv", rows * width, _BYTE, target=begin * width, peer=peer) for peer, begin, rows in _parts(asked.received)]
    return sends + receives


def _parts(rows: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Of every rank that has any: its number, where its rows begin, and how many they are."""
    begins = itertools.accumulate(rows, initial=0)
    return ((rank, begin, count) for rank, (begin, count) in enumerate(zip(begins, rows)) if count)


def received_bytes(asked: Agreed, rank: int) -> int:
    """Bytes that the rank receives: not for an allreduce, whose result is as long as its input."""
    if asked.kind == _native.BROADCAST:
        return asked.count
    return asked.row_bytes * (asked.sent[rank] if asked.kind == _native.REDUCESCATTER else sum(asked.received))


def routes(made: Sequence[nccl.Call]) -> set[tuple[str, int]]:
    """What NCCL may have to connect first, waiting for other ranks: each rank at the other end of a send or receive, and each function anew
    for every magnitude, because the algorithm depends on the size."""
    return {(c.function, c.peer if c.function in ("ncclSend", "ncclRecv") else -c.count.bit_length()) for c in made}
