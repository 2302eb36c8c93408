"""Every reduction, type and factor while the last rank has joined, against NumPy, bit by bit but for the sign of a 0.

Under Horovod's semantics an average divides by all ranks, and there is no reducescatter then.
"""
# ruff: noqa: PT017 - worker scripts run without pytest

import os

import common
import numpy as np

import collective_core as cc

FLOATS = ("float16", "float32", "float64")
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
OPS = ("Sum", "Average", "Min", "Max", "Product")
#: Before and after: none, a fraction, what lets small integers overflow, what turns an order round, nothing, and what is 0 as float32.
FACTORS = ((1.0, 1.0), (1.0, 0.5), (0.5, 1.0), (3.0, 0.25), (-1.0, 1.0), (0.0, 1.0), (1e-60, 1.0))

cc.init()
rank, size = cc.rank(), cc.size()
active = range(size - 1)
as_horovod = os.environ.get("COLLECTIVE_SEMANTICS") == "horovod"
divisor = size if as_horovod else len(active)
checked = 0


def counts(dtype):
    """Inline, its edges, and more than a block of every way beyond it."""
    item = np.dtype(dtype).itemsize
    return 7, 4096 // item, 4096 // item + 1, 33_333


def scaled(values, factor):
    """As the engine says: floating types in their own precision, integers in float64, rounded towards zero, kept in the range of int64."""
    if factor == 1.0:
        return values
    with np.errstate(all="ignore"):
        if values.dtype.kind == "f":
            return values * values.dtype.type(factor)
        most = 9223372036854774784.0
        return np.clip(values.astype(np.float64) * factor, -most, most).astype(np.int64).astype(values.dtype)


def expected(dtype, count, op, before, after):
    parts = [common.values(r, count, dtype) for r in active]
    wide = [scaled(part.astype(np.float32) if dtype == "float16" else part, before) for part in parts]
    if dtype == "bool":
        return (np.logical_and if op in ("Min", "Product") else np.logical_or).reduce(parts)
    with np.errstate(all="ignore"):
        return scaled(common.reduce_in_rank_order(wide, op, divisor), after).astype(dtype)


def compare(what, got, want):
    global checked
    checked += 1
    if what.startswith(("Min", "Max", "reducescatter: M")) and got.dtype.kind == "f":
        got, want = got + got.dtype.type(0), want + want.dtype.type(0)  # of 0 and -0, NumPy need not take the first
    assert got.dtype == want.dtype, (what, got.dtype, want.dtype)
    assert got.tobytes() == want.tobytes(), (what, [(got[i], want[i]) for i in np.flatnonzero(got != want)[:3]])


def table():
    for dtype in (*FLOATS, *INTEGERS, "bool"):
        ops = [op for op in OPS if dtype != "bool" or op != "Average"]
        factors = FACTORS if dtype != "bool" else FACTORS[:1]
        for count, op, (before, after) in ((c, o, f) for c in counts(dtype) for o in ops for f in factors):
            what = f"{op} of {dtype}[{count}] prescale {before} postscale {after}"
            how = {"op": op, "prescale_factor": before, "postscale_factor": after, "name": what}
            mine, want = common.values(rank, count, dtype), expected(dtype, count, op, before, after)
            compare(what, cc.allreduce(mine, **how), want)
            if as_horovod:
                continue
            compare(f"reducescatter: {what}", cc.reducescatter(mine, **how), np.array_split(want, size)[rank])


if rank in active:
    table()
    for factor in ("prescale_factor", "postscale_factor"):
        for call in (cc.allreduce,) if as_horovod else (cc.allreduce, cc.reducescatter):
            try:
                call(np.ones(3, dtype=bool), op=cc.Max, **{factor: 2.0})
                raise RuntimeError("a factor of booleans was accepted")
            except cc.CollectiveError as error:
                assert error.kind == "invalid", error
assert cc.join() in active
common.report(checked=checked)
cc.shutdown()
