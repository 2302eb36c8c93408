"""One rank kills itself; the others must raise soon, naming it. argv: victim, phase (waiting, busy or arena)."""

import os
import signal
import sys
import time

import common
import numpy as np

import collective_core as cc

victim, phase = int(sys.argv[1]), sys.argv[2]
cc.init()
rank = cc.rank()
cc.barrier()
data = np.ones(4_000_000, dtype=np.float32)
if phase == "arena":
    data = cc.empty(4_000_000)
    data[:] = 0
if rank == victim:

    def die():
        common.report(pid=os.getpid(), victim=True, dies_at=time.time())
        os.kill(os.getpid(), signal.SIGKILL)

    if phase != "waiting":
        # In the middle of a collective, from another thread.
        import threading

        threading.Timer(0.3, die).start()
        while True:
            cc.allreduce(data, op=cc.Sum, name="gradient", out=data)
    time.sleep(0.5)
    die()
try:
    started = time.monotonic()
    if phase == "waiting":
        cc.barrier("alive")
    else:
        while True:
            cc.allreduce(data, op=cc.Sum, name="gradient", out=data)
except cc.CollectiveError as error:
    waited, raised_at = time.monotonic() - started, time.time()
    # The memory is the caller's again: nobody who was still busy with it may write there.
    data[:] = 7
    time.sleep(0.2)
    untouched = bool((data == 7).all())
    try:
        cc.barrier("after")
        again = "no error"
    except cc.CollectiveError as second:
        again = str(second)
    common.report(
        untouched=untouched, error=str(error), kind=error.kind, ranks=list(error.ranks), waited=waited, raised_at=raised_at, again=again
    )
    cc.shutdown()
os._exit(0)  # MPI_Finalize would wait for the dead rank
