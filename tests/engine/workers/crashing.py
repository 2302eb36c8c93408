"""Rank 0 ends by an exception while the others compute. argv: the timeline's file, or nothing."""

import os
import sys
import time

import collective_core.torch as hvd
import common
import torch

#: Seconds after which nobody may wait for the crashed rank, nor it for others.
NOTICE = 2.0

hvd.init()
if sys.argv[1:]:
    hvd.start_timeline(sys.argv[1])
pids = hvd.allgather_object(os.getpid())
hvd.allreduce(torch.ones(3), name="before")
if hvd.rank() == 0:
    hvd.allreduce_async(torch.ones(100_000), name="in flight")
    raise RuntimeError("the program's own mistake")
time.sleep(NOTICE)
try:
    os.kill(pids[0], 0)
    gone = False
except ProcessLookupError:
    gone = True
begun = time.monotonic()
try:
    hvd.grouped_allreduce([torch.ones(2), torch.ones(3)], name="g")
except hvd.HorovodInternalError as error:
    common.report(gone=gone, waited=time.monotonic() - begun, kind=error.kind, ranks=error.ranks, error=str(error))
    raise
