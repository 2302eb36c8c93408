"""Rank 2 dies while rank 0 sums with it in a process set of theirs. Rank 1, in another operation, waits for rank 0, which ends then."""

import os
import signal
import sys

import common
import numpy as np

import collective_core as cc

cc.init()
some = cc.add_process_set([0, 2])
pids = cc.allgather(np.array([os.getpid()], dtype=np.int64))
if cc.rank() == 2:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    if cc.rank() == 0:
        cc.allreduce(np.ones(3), process_set=some, name="of two")
    else:
        cc.barrier("of all")
except cc.CollectiveError as error:
    common.report(error=str(error), kind=error.kind, ranks=list(error.ranks), dead=int(pids[2]))
sys.exit(0)
