"""The calls of NCCL that carry an agreed operation: all ranks' calls, simulated in NumPy, against what the operation has to give."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest
from collective_core.transport import nccl, nccl_calls

from collective_core import _native

TYPES = {number: np.dtype(name) for name, number in nccl.TYPES.items() if name != "bfloat16"}
REDUCE = {nccl.SUM: np.add, nccl.PRODUCT: np.multiply, nccl.MIN: np.minimum, nccl.MAX: np.maximum}
#: Rows of each rank: even, uneven, empty ranks, a single rank with any, a rank that has joined looks like an empty one.
ROWS = [[2, 2], [3, 1], [0, 4], [5, 0], [1, 1, 1], [1, 0, 2], [0, 0, 7], [4, 4, 4, 4], [3, 3, 3, 2], [1, 2, 3, 4, 5, 6, 7]]


def asked(kind, dtype="float32", **more):
    nothing = {"reduce": _native.SUM, "root": 0, "contributors": 0, "tag": 0, "count": 0, "row_bytes": 0, "sent": [], "received": []}
    return nccl_calls.Agreed(**{**nothing, "kind": kind, "dtype": _native.DTYPES[dtype], **more})


def view(memory, offset, call):
    """The elements of a call in a rank's memory, which must hold all of them."""
    length = call.count * TYPES[call.dtype].itemsize
    assert 0 <= offset <= offset + length <= memory.nbytes
    return memory[offset : offset + length].view(TYPES[call.dtype])


def simulate(plans, sources, targets):
    """Runs every rank's calls as NCCL does: the n-th collective of each rank belongs together, a send to the receive at its other end."""
    size, posts = len(plans), {}
    for rank, plan in enumerate(plans):
        for call in plan:
            if call.function == "ncclSend":
                posts.setdefault((rank, call.peer), []).append(view(sources[rank], call.source, call))
    for rank, plan in enumerate(plans):
        for call in plan:
            if call.function == "ncclRecv":
                part = view(targets[rank], call.target, call)
                sent = posts[call.peer, rank].pop(0)
                assert sent.size == part.size
                part[:] = sent
    assert not any(posts.values()), "sent and never received"
    collectives = [[call for call in plan if call.function not in ("ncclSend", "ncclRecv")] for plan in plans]
    assert len({len(plan) for plan in collectives}) == 1
    for calls in zip(*collectives, strict=True):
        assert len({(call.function, call.count, call.dtype, call.reduction, call.peer) for call in calls}) == 1, calls
        run(calls, sources, targets, size)


def run(calls, sources, targets, size):
    function, count, root = calls[0].function, calls[0].count, calls[0].peer
    if function == "ncclBroadcast":
        sent = view(sources[root], calls[root].source, calls[root]).copy()
        for call, target in zip(calls, targets, strict=True):
            view(target, call.target, call)[:] = sent
    elif function == "ncclAllGather":
        parts = [view(source, call.source, call).copy() for call, source in zip(calls, sources, strict=True)]
        for call, target in zip(calls, targets, strict=True):
            for rank, part in enumerate(parts):
                view(target, call.target + rank * part.nbytes, call)[:] = part
    else:
        whole = [nccl.Call(**{**vars(call), "count": count * (size if function == "ncclReduceScatter" else 1)}) for call in calls]
        total = reduce(REDUCE[calls[0].reduction], [view(source, call.source, call) for call, source in zip(whole, sources, strict=True)])
        for rank, (call, target) in enumerate(zip(calls, targets, strict=True)):
            if function == "ncclReduce" and rank != root:
                continue
            mine = total[rank * count : (rank + 1) * count] if function == "ncclReduceScatter" else total
            view(target, call.target, call)[:] = mine


def random_bytes(count, seed):
    return np.random.default_rng(seed).integers(0, 256, size=count, dtype=np.uint8)


@pytest.mark.parametrize("row_bytes", [1, 6])
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_allgather(rows, row_bytes):
    sources = [random_bytes(count * row_bytes, rank) for rank, count in enumerate(rows)]
    agreed = asked(_native.ALLGATHER, received=rows, row_bytes=row_bytes)
    targets = [np.zeros(nccl_calls.received_bytes(agreed, rank), dtype=np.uint8) for rank in range(len(rows))]
    simulate([nccl_calls.calls(agreed)] * len(rows), sources, targets)
    for target in targets:
        assert np.array_equal(target, np.concatenate(sources))
    even = len(set(rows)) == 1
    assert {call.function for call in nccl_calls.calls(agreed)} == {"ncclAllGather" if even else "ncclBroadcast"}


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("joined", [None, 1])
def test_alltoall(size, joined):
    row_bytes, generator = 3, np.random.default_rng(size)
    splits = generator.integers(0, 4, size=(size, size))
    splits[0, -1] = 0
    if joined is not None:
        splits[joined] = 0  # it sends nothing, and receives what others have for it
    sources = [random_bytes(int(row.sum()) * row_bytes, rank) for rank, row in enumerate(splits)]
    everyone = [
        asked(_native.ALLTOALL, sent=splits[rank].tolist(), received=splits[:, rank].tolist(), row_bytes=row_bytes) for rank in range(size)
    ]
    targets = [np.zeros(nccl_calls.received_bytes(agreed, rank), dtype=np.uint8) for rank, agreed in enumerate(everyone)]
    simulate([nccl_calls.calls(agreed) for agreed in everyone], sources, targets)
    parts = [np.split(source, np.cumsum(row[:-1]) * row_bytes) for source, row in zip(sources, splits, strict=True)]
    for rank, target in enumerate(targets):
        assert np.array_equal(target, np.concatenate([part[rank] for part in parts]))


@pytest.mark.parametrize("op", ["SUM", "AVERAGE", "MIN", "MAX", "PRODUCT"])
@pytest.mark.parametrize(("rows", "size"), [(4, 2), (5, 2), (1, 3), (6, 3), (8, 3), (7, 4)])
def test_reducescatter(rows, size, op):
    width, shares = 3, [len(part) for part in np.array_split(range(rows), size)]  # rows as even as can be, the first ranks one more
    dtype = "float64" if op == "AVERAGE" else "int32"
    inputs = [np.random.default_rng(rank).integers(-9, 10, size=rows * width).astype(dtype) for rank in range(size)]
    number = getattr(_native, op)
    agreed = asked(_native.REDUCESCATTER, dtype, reduce=number, count=rows * width, row_bytes=width * inputs[0].itemsize, sent=shares)
    targets = [np.zeros(nccl_calls.received_bytes(agreed, rank), dtype=np.uint8) for rank in range(size)]
    simulate([nccl_calls.calls(agreed)] * size, [part.view(np.uint8) for part in inputs], targets)
    whole = reduce(REDUCE[nccl_calls.REDUCTIONS[number]], inputs)
    for target, part in zip(targets, np.split(whole, np.cumsum(shares)[:-1] * width), strict=True):
        assert np.array_equal(target.view(dtype), part)
    assert {call.function for call in nccl_calls.calls(agreed)} == {"ncclReduce" if rows % size else "ncclReduceScatter"}


def test_allreduce_and_broadcast():
    inputs = [np.arange(5, dtype=np.float32) * (rank + 1) for rank in range(3)]
    sources, targets = [part.view(np.uint8) for part in inputs], [np.zeros(20, dtype=np.uint8) for _ in inputs]
    simulate([nccl_calls.calls(asked(_native.ALLREDUCE, reduce=_native.MAX, count=5))] * 3, sources, targets)
    assert all(np.array_equal(target.view(np.float32), inputs[2]) for target in targets)
    simulate([nccl_calls.calls(asked(_native.BROADCAST, "bool", root=1, count=20))] * 3, sources, targets)
    assert all(np.array_equal(target.view(np.float32), inputs[1]) for target in targets)


@pytest.mark.parametrize("kind", ["ALLREDUCE", "REDUCESCATTER"])
@pytest.mark.parametrize(("dtype", "value"), [("float16", 60_000.0), ("float32", 3e38), ("float64", 7.0)])
def test_an_average_of_large_halves_does_not_overflow(dtype, value, kind):
    """Two of three ranks, the third has joined: what the transport puts in, and what it makes of the sum."""
    more = {"sent": [2, 2, 2], "row_bytes": np.dtype(dtype).itemsize} if kind == "REDUCESCATTER" else {}
    agreed = asked(getattr(_native, kind), dtype, reduce=_native.AVERAGE, contributors=2, count=6, **more)
    before, after = nccl_calls.factors(agreed, 0.5, 2.0)
    inputs = [np.full(6, value if rank < 2 else 0.0, dtype) for rank in range(3)]
    sources = [(part * np.dtype(dtype).type(before)).view(np.uint8) for part in inputs]
    targets = [np.zeros((6 if kind == "ALLREDUCE" else 2) * np.dtype(dtype).itemsize, np.uint8) for _ in inputs]
    simulate([nccl_calls.calls(agreed)] * 3, sources, targets)
    for target in targets:
        result = target.view(dtype) * np.dtype(dtype).type(after)
        assert (result == np.dtype(dtype).type(value)).all(), result
    assert nccl_calls.factors(asked(_native.ALLREDUCE, dtype, contributors=2), 0.5, 2.0) == (0.5, 2.0)


def test_what_has_to_be_connected():
    def routes(sent, received):
        return nccl_calls.routes(nccl_calls.calls(asked(_native.ALLTOALL, sent=sent, received=received, row_bytes=1)))

    first = routes([1, 0, 2], [1, 0, 0])
    assert routes([5, 0, 1], [2, 0, 0]) <= first
    assert not routes([0, 1, 0], [1, 0, 0]) <= first  # rank 1 is new
    assert not routes([0, 0, 1], [0, 0, 1]) <= first  # the other direction is
    gathers = [
        nccl_calls.routes(nccl_calls.calls(asked(_native.ALLGATHER, received=rows, row_bytes=1))) for rows in ([1, 1], [1, 2], [0, 3])
    ]
    assert not gathers[1] <= gathers[0]
    assert gathers[2] <= gathers[1]
    small, as_small, large = (nccl_calls.routes(nccl_calls.calls(asked(_native.ALLREDUCE, count=count))) for count in (5, 7, 1000))
    assert small == as_small
    assert not large <= small, "NCCL has another algorithm for it"


def test_a_transfer_is_copied():
    """The engine's structure is gone when its call returns."""
    rows = (_native.c_int64 * 2)(3, 4)
    transfer = _native.Transfer(kind=_native.ALLGATHER, tag=7, row_bytes=8, received=rows)
    agreed = nccl_calls.agreed(transfer, 2)
    rows[0], transfer.tag = 0, 0
    assert (agreed.tag, agreed.row_bytes, agreed.sent, agreed.received) == (7, 8, [], [3, 4])
