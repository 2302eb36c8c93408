"""Ranks that ask for different things get the same error everywhere, and the engine goes on working."""
# ruff: noqa: PT017 - worker scripts run without pytest

import common
import numpy as np

import collective_core as cc

cc.init()
rank, size = cc.rank(), cc.size()
odd_one = size - 1


def expect_mismatch(case, call, *fragments):
    try:
        call()
    except cc.CollectiveError as error:
        text = str(error)
        assert error.kind == "mismatch", (case, error.kind, text)
        assert odd_one in error.ranks, (case, error.ranks)
        for fragment in (*fragments, f"rank {odd_one} (host ", "pid "):
            assert fragment in text, (case, fragment, text)
        if case == "shape":
            common.report(text=text)
    else:
        raise AssertionError(f"{case}: no error on rank {rank}")
    total = cc.allreduce(np.full(100_000, rank, dtype=np.float32), op=cc.Sum)
    assert (total == sum(range(size))).all(), f"{case}: the engine is out of order"


different = rank == odd_one
for count in (10, 500_000):  # inline and through the buffers
    length = count + different
    expect_mismatch("shape", lambda n=length: cc.allreduce(np.zeros(n, np.float32), name="w"), f"float32[{count}]", f"[{count + 1}]")
    kind = np.float64 if different else np.float32
    expect_mismatch("dtype", lambda k=kind, n=count: cc.allreduce(np.zeros(n, k), name="w"), "float32", "float64")
expect_mismatch("op", lambda: cc.allreduce(np.zeros(4), name="w", op=cc.Max if different else cc.Sum), "Max", "Sum")
expect_mismatch("root", lambda: cc.broadcast(np.zeros(4), root_rank=int(different), name="w"), "root 0", "root 1")
expect_mismatch("kind", lambda: cc.barrier("w") if different else cc.allreduce(np.zeros(4), name="w"), "barrier", "allreduce")
expect_mismatch("name", lambda: cc.allreduce(np.zeros(4), name="b" if different else "a"), "'a'", "'b'")
expect_mismatch("columns", lambda: cc.allgather(np.zeros((2, 3 + different)), name="w"), "[2, 3]", "[2, 4]")

# Wrong in itself, on all ranks.
for call in (
    lambda: cc.allreduce(np.zeros(3), op="Adasum"),
    lambda: cc.allreduce(np.zeros(3, np.complex64)),
    lambda: cc.broadcast(np.zeros(3), root_rank=size),
    lambda: cc.allgather(np.float32(1)),
):
    try:
        call()
    except cc.CollectiveError as error:
        assert error.kind == "invalid", error
    else:
        raise AssertionError("no error")
cc.barrier("end")
common.report(done=True)
