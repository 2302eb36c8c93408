"""Arrays in the engine's memory: the same bits as ordinary ones, whatever their place, type, size and reduction."""

from __future__ import annotations

import gc
import hashlib
from pathlib import Path

import common
import numpy as np

import collective_core as cc


def resident():
    """KiB of shared memory that this process has touched."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssShmem"))


cc.init()
rank, size = cc.rank(), cc.size()
digest = hashlib.sha256()
checked = 0


def compare(what, got, want):
    global checked
    checked += 1
    assert got.dtype == want.dtype, what
    assert got.tobytes() == want.tobytes(), (what, np.flatnonzero(got != want)[:5])
    digest.update(got.tobytes())


# 1 to just past what travels inline; sizes that no number of ranks divides; more than any cache of a small processor.
COUNTS = [1, 7, 1023, 1024, 1025, 2049, 20_001, 262_147]
for dtype in ("float32", "float64", "float16", "int8", "int32", "uint64", "bool"):
    for count in COUNTS + [3_000_017] * (dtype == "float32"):
        everyone = [common.values(r, count, dtype, seed=3) for r in range(size)]
        for op in ["Sum"] + ["Average", "Max", "Product"] * (count < 3000 and dtype != "bool"):
            want = common.reduce_in_rank_order(everyone, op)
            label = f"{op} {dtype}[{count}]"
            array = cc.empty(count, dtype)
            array[:] = everyone[rank]
            target = cc.empty(count, dtype)
            assert cc.allreduce(array, op=op, out=target) is target
            compare(f"{label} into another", target, want)
            assert array.tobytes() == everyone[rank].tobytes(), "the input was changed"
            cc.allreduce(array, op=op, out=array)
            compare(f"{label} in place", array, want)
            array[:] = everyone[rank]
            compare(f"{label} into ordinary memory", cc.allreduce(array, op=op), want)

# Views that begin in the middle of a cache line, differently on every rank; several dimensions.
for shift, count in [(1, 5000), (3, 70_001), (17, 1_000_003)]:
    everyone = [common.values(r, count, "float32", seed=4) for r in range(size)]
    whole = cc.empty(count + shift + size + 1)
    whole[:] = -1.0
    view = whole[shift + rank : shift + rank + count]
    view[:] = everyone[rank]
    cc.allreduce(view, op=cc.Sum, out=view)
    compare(f"view {shift}", view, common.sum_in_rank_order(everyone))
    assert (whole[: shift + rank] == -1.0).all(), "wrote before the view"
    assert (whole[shift + rank + count :] == -1.0).all(), "wrote behind the view"
matrix = cc.empty((31, 101), np.float64)
assert matrix.shape == (31, 101)
assert matrix.flags.c_contiguous
matrix[:] = rank
compare("matrix", cc.allreduce(matrix, op=cc.Sum, out=matrix), np.full((31, 101), float(sum(range(size)))))
assert cc.empty((0, 3)).shape == (0, 3)

# Some ranks' arrays are in the arena and some are not.
everyone = [common.values(r, 200_003, "float32", seed=5) for r in range(size)]
mixed = cc.empty(200_003) if rank % 2 else np.empty(200_003, np.float32)
mixed[:] = everyone[rank]
compare("mixed", cc.allreduce(mixed, op=cc.Sum, out=mixed), common.sum_in_rank_order(everyone))
# Hosts that reach the tensors of their ranks in different ways, on one ring.
mixed = cc.empty(200_003) if cc.cross_rank() % 2 else np.empty(200_003, np.float32)
mixed[:] = everyone[rank]
compare("mixed by host", cc.allreduce(mixed, op=cc.Sum, out=mixed), common.sum_in_rank_order(everyone))

# Memory goes back when the last view is gone, and is found again.
before = resident()
for _ in range(20):
    block = cc.empty(4 << 20, np.uint8)
    block[:] = 1
    view = block[100:]
    del block
    gc.collect()
    assert view[5] == 1
    del view
    gc.collect()
assert resident() < before + (8 << 10), "freed blocks kept their pages"

# An array outlives the engine; afterwards it is ordinary memory, and a new engine has an arena of its own.
old = cc.empty(100_003)
old[:] = rank
cc.shutdown()
old += 1
assert (old == rank + 1).all()
cc.init()
new = cc.empty(100_003)
new[:] = rank + 1
for array in (old, new):
    cc.allreduce(array, op=cc.Sum, out=array)
    compare("second life", array, np.full(100_003, sum(range(1, size + 1)), np.float32))
del old, new
gc.collect()

# The same array again and again, changed in between: its values, then its shape, its type and the reduction.
for array in (np.empty(24, np.float32), cc.empty(24), np.empty(30_000, np.float32), cc.empty(30_000)):
    for step in range(4):
        array[:] = rank + step
        cc.allreduce(array, op=cc.Sum, out=array)
        compare("again", array, np.full(array.size, sum(r + step for r in range(size)), np.float32))
    array[:] = rank
    compare("another reduction", cc.allreduce(array, op=cc.Max, out=array), np.full(array.size, size - 1, np.float32))
    array.shape = (2, -1)
    array[:] = rank
    compare("another shape", cc.allreduce(array, op=cc.Max, out=array), np.full(array.shape, size - 1, np.float32))
    array.dtype = np.int32
    array[:] = 1 << 24 | 1  # not a float32
    compare("another type", cc.allreduce(array, op=cc.Sum, out=array), np.full(array.shape, (1 << 24 | 1) * size, np.int32))
    if size > 1:
        try:
            cc.allreduce(array, op=cc.Sum if rank else cc.Min, out=array)
            complaint = "none"
        except cc.CollectiveError as error:
            complaint = error.kind
        assert complaint == "mismatch"
    array[:] = rank
    compare("after a mismatch", cc.allreduce(array, op=cc.Sum, out=array), np.full(array.shape, sum(range(size)), np.int32))
for wrong in (np.empty(5, np.float32), np.empty(4, np.float64), np.empty(8, np.float32)[::2]):
    try:
        cc.allreduce(np.ones(4, np.float32), out=wrong)
        complaint = "none"
    except cc.CollectiveError as error:
        complaint = str(error)
    assert "out must be" in complaint
common.report(digest=digest.hexdigest(), checked=checked)
cc.shutdown()
