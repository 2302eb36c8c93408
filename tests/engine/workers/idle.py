"""Rank 1 is killed while the others have nothing under way: they learn of it by looking around, as one does while a GPU is at work."""

import os
import signal
import time

import common
import numpy as np

import collective_core as cc
from collective_core import _native

cc.init()
cc.allreduce(np.ones(3))
_native.check_peers(0)  # all is well
if cc.rank() == 1:
    time.sleep(0.5)
    common.report(error=None)
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    try:
        _native.check_peers(0)
        time.sleep(0.05)
    except cc.CollectiveError as error:
        common.report(kind=error.kind, ranks=list(error.ranks))
        break
try:
    cc.barrier()
except cc.CollectiveError:
    os._exit(0)
