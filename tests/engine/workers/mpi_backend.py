"""COLLECTIVE_BACKEND=mpi: every collective and type; that MPI has carried the large tensors, and that errors are as elsewhere."""

import gc
import weakref

import common
import numpy as np
from collective_core.extensions import mpi

import collective_core as cc

carried = []
start = mpi.MpiTransport._start
mpi.MpiTransport._start = lambda self, transfer: (carried.append(transfer.kind), start(self, transfer))[1]

cc.init()
rank, size = cc.rank(), cc.size()
LARGE = 300_007
#: Relative to the sum of magnitudes, which bounds the error of a sum in any order.
EXACT = {"float64": 1e-14, "float32": 1e-5, "float16": 2e-3}

for dtype in ["float32", "float64", "float16", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bool"]:
    for count in (3, LARGE):
        everyone = [common.values(r, count, dtype) for r in range(size)]
        if dtype == "float16":
            everyone = [np.clip(values, -100, 100) for values in everyone]
        mine = everyone[rank].copy()
        for op in ["Sum"] if dtype == "bool" else ["Sum", "Average", "Min", "Max", "Product"]:
            if op == "Product" and dtype == "float16":
                continue  # beyond its range
            got, want = cc.allreduce(mine, op=op, name=f"{op}.{dtype}.{count}"), common.reduce_in_rank_order(everyone, op)
            assert got.dtype == want.dtype
            if dtype in EXACT:
                wide = [np.abs(values.astype(np.float64)) for values in everyone]
                bound = np.prod(wide, axis=0) if op == "Product" else np.sum(wide, axis=0)
                assert (np.abs(got.astype(np.float64) - want.astype(np.float64)) <= EXACT[dtype] * bound).all(), (op, dtype, count)
            else:
                assert got.tobytes() == want.tobytes(), (op, dtype, count)
        assert mine.tobytes() == everyone[rank].tobytes(), "the input was changed"
        root = count % size
        assert cc.broadcast(mine, root).tobytes() == everyone[root].tobytes()
        assert cc.allgather(mine).tobytes() == np.concatenate(everyone).tobytes()
        if count == LARGE:
            assert len(carried) >= 3, f"MPI carried nothing of {dtype}"
            carried.clear()

# Factors, in place, rows of different numbers, splits, rows of a sum.
ones = np.ones(LARGE, dtype=np.float32)
assert (cc.allreduce(ones, op=cc.Sum, prescale_factor=0.5, postscale_factor=3.0) == 1.5 * size).all()
assert cc.allreduce(ones, op=cc.Sum, out=ones) is ones
assert (ones == size).all()
blocks = [np.full((5000 * r, 7), r, dtype=np.float64) for r in range(size)]
assert cc.allgather(blocks[rank]).tobytes() == np.concatenate(blocks).tobytes()
parts = [[1000 * ((r + to) % 3) for to in range(size)] for r in range(size)]
mine = np.concatenate([np.full((parts[rank][to], 11), 100 * rank + to, dtype=np.int32) for to in range(size)])
came, rows = cc.alltoall(mine, parts[rank])
assert rows == [parts[r][rank] for r in range(size)]
assert came.tobytes() == np.concatenate([np.full((parts[r][rank], 11), 100 * r + rank, dtype=np.int32) for r in range(size)]).tobytes()
whole = np.arange(40_001 * 3, dtype=np.int64).reshape(-1, 3)
scattered = cc.reducescatter(whole, op=cc.Sum)
before = sum(40_001 // size + (1 if r < 40_001 % size else 0) for r in range(rank))
assert scattered.tobytes() == (whole * size)[before : before + len(scattered)].tobytes()

# A set of its own, at the same time as the job's; a rank without data; a disagreement, after which all goes on.
if size > 2:
    pair = cc.add_process_set([0, size - 1])
    if pair.included():
        assert (cc.allreduce(np.full(LARGE, rank, dtype=np.float32), op=cc.Sum, process_set=pair) == size - 1).all()
    cc.remove_process_set(pair)
if rank > 0:
    assert (cc.allreduce(np.full(LARGE, 2.0), op=cc.Average, name="without rank 0") == 2.0).all()
cc.join()
try:
    cc.allreduce(np.ones(LARGE + (rank == 0), dtype=np.float32), name="odd")
    problem = ""
except cc.CollectiveError as error:
    problem = f"{error.kind}: {error}"
assert problem.startswith("mismatch"), problem
assert (cc.allreduce(np.ones(LARGE), op=cc.Sum) == size).all()

try:
    import collective_core.torch as hvd
    import torch

    assert hvd.mpi_enabled()
    half = torch.full((LARGE,), 1.0 + rank, dtype=torch.bfloat16)
    handles = [hvd.allreduce_async(half, op=hvd.Sum, name=f"bfloat16.{i}") for i in range(3)]
    for handle in handles:
        assert (hvd.synchronize(handle).float() == size * (size + 1) / 2).all()
    # A disagreement ends nothing: MPI has not seen the tensors, and nobody keeps them.
    odd = torch.ones(LARGE + (rank == 0))
    gone, kind = weakref.ref(odd), ""
    try:
        hvd.synchronize(hvd.allreduce_async_(odd, name="odd"))
    except hvd.HorovodInternalError as error:
        kind = error.kind
    del odd
    gc.collect()
    assert kind == ("mismatch" if size > 1 else "")
    assert gone() is None, "a tensor of an operation that failed is kept"
except ImportError:
    pass
common.report(done=True)
