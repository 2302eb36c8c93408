"""Every collective, type and size against NumPy. Reports a digest of all results."""

from __future__ import annotations

import hashlib

import common
import numpy as np

import collective_core as cc

cc.init()
rank, size = cc.rank(), cc.size()
assert (rank, size) == (common.RANK, common.SIZE)
digest = hashlib.sha256()
checked = 0


def compare(what, got, want):
    global checked
    checked += 1
    assert got.dtype == want.dtype, (what, got.dtype, want.dtype)
    assert got.shape == want.shape, (what, got.shape, want.shape)
    assert got.tobytes() == want.tobytes(), (what, np.flatnonzero(got != want)[:5])
    digest.update(got.tobytes())


FLOATS = ["float32", "float64", "float16"]
LARGE = ["float32", "float64", "float16", "uint8", "int64"]
INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]


def counts(dtype):
    """0, 1, odd, the edges of the payload that travels inline, and more than any chunk buffer (2 MiB)."""
    item = np.dtype(dtype).itemsize
    large = (2 << 20) // item + 4099
    small = [0, 1, 3, 1031, 4096 // item, 4096 // item + 1, 20_001]
    return small + [large] * (dtype in LARGE) + [2 * large + 1] * (dtype == "float32")


for dtype in [*FLOATS, *INTEGERS, "bool"]:
    for count in counts(dtype):
        label = f"{dtype}[{count}]"
        everyone = [common.values(r, count, dtype) for r in range(size)]
        mine = everyone[rank].copy()
        ops = ["Sum"]
        if count <= 20_001:
            ops += ["Min", "Max"] if dtype == "bool" else ["Average", "Min", "Max", "Product"]
        for op in ops:
            if dtype == "bool" and op in ("Min", "Max"):
                function = np.logical_and if op == "Min" else np.logical_or
                want = function.reduce(everyone)
            else:
                want = common.reduce_in_rank_order(everyone, op)
            compare(f"{op} {label}", cc.allreduce(mine, op=op, name=f"{op}.{label}"), want)
        assert mine.tobytes() == everyone[rank].tobytes(), "the input was changed"
        if dtype in ("int16", "uint16", "uint32", "int8"):
            continue
        root = count % size
        compare(f"broadcast {label}", cc.broadcast(mine, root), everyone[root])
        compare(f"allgather {label}", cc.allgather(mine), np.concatenate(everyone))

# Different first dimensions, some of them empty; more dimensions.
for rows, columns in [(0, 3), (1, 5), (3, 1001), (700, 1001)]:
    blocks = [np.full((rows * r, columns), r, dtype=np.float32) for r in range(size)]
    compare(f"allgather {rows}x{columns}", cc.allgather(blocks[rank]), np.concatenate(blocks))
compare("scalar", cc.allreduce(np.float64(rank), op=cc.Sum), np.asarray(np.float64(sum(range(size)))))
compare("strided", cc.allreduce(np.arange(20.0)[::2], op=cc.Sum), np.arange(20.0)[::2] * size)

# The order of summation does not depend on how the data is cut.
whole = [common.values(r, 600_011, "float32", seed=1) for r in range(size)]
total = cc.allreduce(whole[rank], op=cc.Sum)
for begin, end in [(0, 5), (17, 1200), (1001, 150_000), (131_071, 600_011)]:
    compare(f"slice {begin}:{end}", cc.allreduce(whole[rank][begin:end], op=cc.Sum), total[begin:end])
if size > 2:
    rotated = common.sum_in_rank_order(whole[1:] + whole[:1])
    assert rotated.tobytes() != total.tobytes(), "the values do not tell one order from another"

# In two parts on several hosts (16 MiB), the first of which ends within a row.
rows = np.resize(whole[rank], (1_500_001, 3))
scattered = cc.reducescatter(rows, op=cc.Sum)
assert scattered.tobytes() == np.array_split(np.resize(total, rows.shape), size)[rank].tobytes(), "reducescatter"

scaled = cc.allreduce(whole[rank], op=cc.Sum, prescale_factor=0.5, postscale_factor=3.0)
compare("scaled", scaled, common.sum_in_rank_order([w * np.float32(0.5) for w in whole]) * np.float32(3.0))
for _ in range(20):
    cc.barrier()

hosts = common.HOSTS
local = [r for r in range(size) if r * hosts // size == rank * hosts // size]
assert (cc.local_rank(), cc.local_size()) == (local.index(rank), len(local))
assert cc.cross_size() <= hosts
cc.shutdown()
assert not cc.is_initialized()
cc.init()  # a second life, with new connections and a new secret
compare("again", cc.allreduce(np.arange(5.0), op=cc.Sum), np.arange(5.0) * size)
common.report(digest=digest.hexdigest(), checked=checked)
cc.shutdown()
