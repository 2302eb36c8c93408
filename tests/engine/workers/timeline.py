"""Work under a timeline, where rank 1 computes longer than the others. argv: the file, and how the timeline is switched on."""

import sys
import time

import collective_core.torch as hvd
import common
import torch

path, how = sys.argv[1:]
hvd.init()
if how == "call":
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
