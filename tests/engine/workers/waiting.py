"""The last rank comes late, the others wait. argv: then it is killed in the middle of an operation (``die``), or stopped (``stop``)."""

import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import collective_core.torch as hvd
import common
import torch

#: Bytes of a part of a timeline that must be there before the rank dies.
HEAD_AND_SOME = 400

hvd.init()
rank, size = hvd.rank(), hvd.size()
pids, running = hvd.allgather_object(os.getpid()), ""
if rank == size - 1:
    time.sleep(float(os.environ.get("TEST_LATE", "3")))
    sys.path.append(str(Path(__file__).parents[3]))
    running = runpy.run_module("provision.hostside.stall")["recorded"](pids[0])[1]
hvd.allreduce(torch.ones(10), name="loss")
common.report(pid=os.getpid(), running=running)
if sys.argv[1:] == ["stop"]:
    gradient = torch.ones(1 << 25)
    if rank == size - 1:
        until_stopped = f"until grep -q '^State:.T' /proc/{os.getpid()}/status; do sleep 0.1; done"
        again = ["timeout", "60", "sh", "-c", f"{until_stopped}; sleep 5; kill -CONT {os.getpid()}"]
        subprocess.Popen(again, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    hvd.barrier()
    handle = hvd.allreduce_async_(gradient, name="gradient", op=hvd.Sum)
    if rank == size - 1:
        while gradient[0] == 1 and gradient[-1] == 1:  # until its data moves
            pass
        os.kill(os.getpid(), signal.SIGSTOP)
    hvd.synchronize(handle)
    assert (gradient == size).all()
if sys.argv[1:] == ["die"]:
    if rank == size - 1:
        while os.path.getsize(f"{os.environ['COLLECTIVE_TIMELINE']}.rank{rank:04d}.events") < HEAD_AND_SOME:
            time.sleep(0.01)
        handle = hvd.allreduce_async(torch.ones(3_000_000), name="never")
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        hvd.allreduce(torch.ones(3_000_000), name="gradient")
    except hvd.HorovodInternalError:
        os._exit(0)
hvd.shutdown()
