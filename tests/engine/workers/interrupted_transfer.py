"""Ctrl-C on rank 0 while MPI moves its tensor, for which rank 1's MPI is late."""

import os
import signal
import threading

import common
import numpy as np
from collective_core.runtime import external

import collective_core as cc

data = np.ones(1 << 20)
cc.init()
cc.allreduce(data)
transport = external._current
start = transport._start
if cc.rank() == 0:

    def begun(transfer):
        start(transfer)
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()

    transport._start = begun
else:
    transport._start = lambda transfer: (common.wait_to_be_told("rank 0 was interrupted"), start(transfer))
try:
    cc.allreduce(data)
    common.report(error="none")
except KeyboardInterrupt:
    common.tell("rank 0 was interrupted")
    common.report(error="KeyboardInterrupt")
except cc.CollectiveError as error:
    common.report(error=str(error), kind=error.kind, ranks=list(error.ranks))
cc.shutdown()
