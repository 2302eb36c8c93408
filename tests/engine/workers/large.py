"""Tensors of more than 2^31 bytes: what lies around that boundary, at both ends and between them arrives, and arrives once."""

import collective_core.torch as hvd
import common
import numpy as np
import torch

import collective_core as cc

LENGTH = (1 << 31) + 17
#: Where every element has a value of its own: the beginning, and from before the boundary to the end.
EDGES = (slice(0, 100), slice((1 << 31) - 100, LENGTH))

hvd.init()
rank, size = hvd.rank(), hvd.size()


def edge(part, seed):
    return (np.arange(part.start, part.stop) * 7 + seed).astype(np.uint8)


def check(x, between, edges):
    assert (x[100 : (1 << 31) - 100 : 1021] == between).all()  # a few in every page
    for part, want in zip(EDGES, edges, strict=False):
        assert np.array_equal(x[part], want), (part, x[part], want)


def in_place():
    x = np.full(LENGTH, 1 + rank, dtype=np.uint8)
    tensor = torch.from_numpy(x)
    for part in EDGES:
        x[part] = edge(part, rank)
    hvd.allreduce_(tensor, op=hvd.Sum, name="large")
    check(x, sum(range(1, size + 1)), [sum(edge(part, r) for r in range(size)) for part in EDGES])
    if rank == 0:
        x.fill(5)
        for part in EDGES:
            x[part] = edge(part, 50)
    hvd.broadcast_(tensor, 0, name="large")
    check(x, 5, [edge(part, 50) for part in EDGES])


def mostly_zeros(seed):
    """Takes no memory but for its edges: pages that nobody has written are all the same one."""
    x = np.zeros(LENGTH, dtype=np.uint8)
    for part in EDGES:
        x[part] = edge(part, seed)
    return x


def gathered():
    """The second rank's rows begin a little before the boundary."""
    first = (1 << 31) - 50
    whole = mostly_zeros(3)
    check(cc.allgather(whole[:first] if rank == 0 else whole[first:]), 0, [edge(part, 3) for part in EDGES])


def sent():
    """Everything but one row goes to the second rank, which gets as many of its own."""
    x = mostly_zeros(9) if rank == 0 else np.array([77], dtype=np.uint8)
    got, rows = cc.alltoall(x, [1, LENGTH - 1] if rank == 0 else [0, 1])
    if rank == 0:
        assert rows == [1, 0]
        assert got.tolist() == edge(slice(0, 1), 9).tolist()
    else:
        assert rows == [LENGTH - 1, 1]
        assert np.array_equal(got[:99], edge(EDGES[0], 9)[1:])
        assert np.array_equal(got[EDGES[1].start - 1 : -1], edge(EDGES[1], 9))
        assert got[-1] == 77
        assert not got[99 : (1 << 31) - 101 : 1021].any()


def scattered():
    mine = cc.reducescatter(mostly_zeros(rank), op=cc.Sum)
    end = EDGES[rank]
    want = sum(edge(end, r) for r in range(size))
    assert mine.size == LENGTH // 2 + (1 if rank == 0 else 0)
    assert np.array_equal(mine[:100] if rank == 0 else mine[-want.size :], want)
    assert not (mine[100::1021] if rank == 0 else mine[: -want.size : 1021]).any()


for part_of_it in (in_place, gathered, sent, scattered):
    part_of_it()
common.report(bytes=LENGTH)
hvd.shutdown()
