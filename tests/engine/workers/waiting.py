"""The last rank comes late, the others wait. Then the last one is killed in the middle of an operation, if argv says so."""

import os
import signal
import sys
import time

import collective_core.torch as hvd
import common
import torch

#: Bytes of a part of a timeline that must be there before the rank dies.
HEAD_AND_SOME = 400

hvd.init()
rank, size = hvd.rank(), hvd.size()
hvd.barrier()
if rank == size - 1:
    time.sleep(float(os.environ.get("TEST_LATE", "3")))
hvd.allreduce(torch.ones(10), name="loss")
common.report(pid=os.getpid())
if len(sys.argv) > 1:
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
