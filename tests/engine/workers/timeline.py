"""Work under a timeline, where rank 1 computes longer than the others. argv: the file, and how the timeline is switched on."""
# ruff: noqa: PT017 - worker scripts run without pytest

import sys
import time

import collective_core.torch as hvd
import common
import torch

path, how = sys.argv[1:]
hvd.init()
if how == "call":
    try:  # as some programs do it with Horovod
        hvd.start_timeline(path) if hvd.rank() == 0 else hvd.allreduce(torch.ones(1), name="first")
        raise RuntimeError("a timeline of one rank")
    except hvd.HorovodInternalError as error:
        assert error.kind == "mismatch", error
        assert "start_timeline(), which every rank must call" in str(error), error
    hvd.start_timeline(path)
    try:
        hvd.start_timeline(path)
        raise RuntimeError("two timelines at once")
    except ValueError:
        pass
clock = time.monotonic_ns()
for step in range(5):
    time.sleep(0.06 if hvd.rank() == 1 else 0.01)
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
