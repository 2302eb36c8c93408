"""Rank 0 ends by an exception while the others compute. argv: the timeline's file, or nothing."""

import os
import sys
import time

import collective_core.torch as hvd
import common
import torch

#: Seconds in which a rank that waits for nobody has ended. What it must not wait for lasts longer: the others ask for nothing until then.
ENDS_WITHIN = 20.0


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


hvd.init()
if sys.argv[1:]:
    hvd.start_timeline(sys.argv[1])
pids = hvd.allgather_object(os.getpid())
hvd.allreduce(torch.ones(3), name="before")
if hvd.rank() == 0:
    hvd.allreduce_async(torch.ones(100_000), name="in flight")
    raise RuntimeError("the program's own mistake")
end = time.monotonic() + ENDS_WITHIN
while is_there(pids[0]) and time.monotonic() < end:
    time.sleep(0.02)
gone = not is_there(pids[0])
begun = time.monotonic()
try:
    hvd.grouped_allreduce([torch.ones(2), torch.ones(3)], name="g")
except hvd.HorovodInternalError as error:
    common.report(gone=gone, waited=time.monotonic() - begun, kind=error.kind, ranks=error.ranks, error=str(error))
    raise
