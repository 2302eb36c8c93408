"""Only a thread calls, for another name on each rank, while the main thread waits for it: a mismatch before the timeout, also with
COLLECTIVE_STALL_WARNING=0, after which the engine goes on."""

import threading

import common
import numpy as np

import collective_core as hvd

hvd.init()
kinds = []


def call():
    try:
        hvd.allreduce(np.ones(3), name=f"of rank {hvd.rank()}")
    except hvd.CollectiveError as error:
        kinds.append(error.kind)


thread = threading.Thread(target=call)
thread.start()
thread.join()
common.report(kinds=kinds, then=float(hvd.allreduce(np.ones(1), op=hvd.Sum)[0]))
hvd.shutdown()
