"""Work under a timeline, where rank 1 computes longer than the others. argv: the file, and how the timeline is switched on."""

import json
import os
import sys
import time
from pathlib import Path

import collective_core.torch as hvd
import common
import torch
from collective_core.observe import recorder, timeline

import collective_core as cc

path, how = Path(sys.argv[1]), sys.argv[2]
timeline.PIECES = timeline.MIN_PIECE = 5000  # so that a part does not go in one piece
hvd.init()
rank, size = hvd.rank(), hvd.size()


def drawn(file):
    """Which rank did what."""
    return {(row["pid"], row["name"]) for row in json.loads(file.read_text())["traceEvents"] if row["ph"] == "X" and row["name"] != "wait"}


def alone_on_rank_0():
    """As Horovod's users write it: the others know nothing of it, and nobody waits for anybody."""
    mine = path.with_name("alone.json")
    if rank == 0:
        hvd.start_timeline(str(mine))
        hvd.start_timeline(str(mine))  # the same once more, which Horovod's programs may do
    hvd.allreduce(torch.ones(50_000), name="first")
    handle = hvd.allreduce_async(torch.ones(50_000), name="second")
    if rank == 0:
        hvd.stop_timeline()
        assert drawn(mine) == {(0, "allreduce first"), (0, "allreduce second")}, drawn(mine)
        mine.unlink()
    hvd.synchronize(handle)


def with_something_under_way():
    """The first that the ranks do together under the timeline is not done when they stop it."""
    mine = path.with_name("short.json")
    hvd.start_timeline(str(mine))
    handle = hvd.allreduce_async(torch.ones(400_000), name="only")
    hvd.stop_timeline()
    hvd.synchronize(handle)
    if rank == 0:
        assert drawn(mine) == {(r, "allreduce only") for r in range(size)}, drawn(mine)
        mine.unlink()


def more_than_the_ring_holds():
    """They are collected when they are many, not only when it is time."""
    mine = path.with_name("many.json")
    usual, timeline.COLLECT_INTERVAL = timeline.COLLECT_INTERVAL, 3600.0
    hvd.start_timeline(str(mine))
    for number in range(recorder.RING + 1000):
        cc.barrier(name=str(number))
    hvd.stop_timeline()
    timeline.COLLECT_INTERVAL = usual
    if rank == 0:
        rows = [row for row in json.loads(mine.read_text())["traceEvents"] if row["ph"] == "X" and row["pid"] == 0]
        assert len(rows) > recorder.RING, len(rows)
        first = rows[0]["args"]["number"] - int(rows[0]["args"]["tensor"])
        assert all(row["args"]["number"] - int(row["args"]["tensor"]) == first for row in rows)
        mine.unlink()


if how == "call":
    alone_on_rank_0()
    with_something_under_way()
    if size == 2:
        more_than_the_ring_holds()
    hvd.barrier()
    # Ranks may name different files, and the folder need not be there on all hosts.
    hvd.start_timeline(str(path if rank < 2 else path.parent / ("other" if rank == 2 else "nowhere") / "other.json"))
    try:
        hvd.start_timeline(str(path.with_name("second.json")))
        raise RuntimeError("two timelines at once")
    except ValueError:
        pass
    if rank == 0:
        assert not os.stat(f"{path}.rank0000.events").st_mode & 0o077
clock = time.monotonic_ns()
for step in range(5):
    time.sleep(0.3 if rank == 1 else 0.01)
    hvd.allreduce(torch.ones(50_000), name=f"gradient.{step}")
handles = [hvd.allreduce_async(torch.ones(400_000), name=f"late.{i}") for i in range(3)]
time.sleep(0.05)
for handle in handles:
    hvd.synchronize(handle)
if how == "call":
    hvd.stop_timeline()
    hvd.stop_timeline()
common.report(clock=clock)
hvd.shutdown()
