"""Reductions among hosts with one rank each against NumPy, bit by bit: types, factors, short and long slices, and none."""

from __future__ import annotations

import common
import numpy as np

import collective_core as cc

cc.init()
rank, size = cc.rank(), cc.size()
checked = 0


def compare(what, got, want):
    global checked
    checked += 1
    assert got.dtype == want.dtype, (what, got.dtype, want.dtype)
    assert got.tobytes() == want.tobytes(), (what, np.flatnonzero(got != want)[:5])


def expected(parts, op, before, after):
    """As the engine says: half types in float32, rounded once."""
    wide = [part.astype(np.float32 if part.dtype == np.float16 else part.dtype) for part in parts]
    total = common.reduce_in_rank_order([part * part.dtype.type(before) for part in wide] if before != 1 else wide, op)
    return (total * total.dtype.type(after) if after != 1 else total).astype(parts[0].dtype)


# Slices of less than a segment, and of several.
for dtype in ("float16", "float32", "float64", "uint8", "int32", "bool"):
    for count in (20_001, *([600_011] if dtype in ("float16", "float32") else [])):
        parts = [common.values(r, count, dtype) for r in range(size)]
        ways = [("Sum", 1, 1)] if dtype in ("uint8", "int32", "bool") else [("Sum", 1, 1), ("Average", 0.5, 3)]
        for op, before, after in ways:
            what, want = f"{op} {dtype}[{count}]", expected(parts, op, before, after)
            factors = {"op": op, "prescale_factor": before, "postscale_factor": after, "name": what}
            compare(what, cc.allreduce(parts[rank], **factors), want)
            in_place = parts[rank].copy()
            cc.allreduce(in_place, out=in_place, **factors)
            compare(f"{what} in place", in_place, want)
            compare(f"{what} scattered", cc.reducescatter(parts[rank], **factors), np.array_split(want, size)[rank])

# Fewer rows than ranks.
parts = [common.values(r, 3 * 70_001, "float32").reshape(3, -1) for r in range(size)]
whole = common.sum_in_rank_order(parts)
compare("few rows", cc.reducescatter(parts[rank], op=cc.Sum), np.array_split(whole, size)[rank])

# The last rank has no more data.
if rank < size - 1:
    part = common.values(rank, 100_003, "float16")
    want = common.reduce_in_rank_order([common.values(r, 100_003, "float16") for r in range(size - 1)], "Average")
    compare("joined", cc.allreduce(part, op=cc.Average, name="joined"), want)
cc.join()
common.report(checked=checked)
cc.shutdown()
