"""A rank is stopped for a while, which is waited for, and then for good: the other ranks of its host see it. argv: which."""

import os
import signal
import subprocess
import sys
import time

import common
import numpy as np

import collective_core as cc

victim = int(sys.argv[1])
cc.init()
pid = int(cc.broadcast(np.array([os.getpid()]), victim)[0])
ones = np.ones(10, dtype=np.float32)
if cc.rank() == victim:
    common.report(pid=pid)
    # By another process: this one stands still.
    subprocess.Popen(["sh", "-c", f"kill -STOP {pid}; sleep 12; touch $TEST_REPORTS/continued; kill -CONT {pid}"])
    common.wait_to_be_told("continued")
cc.allreduce(ones, name="for a while")
if cc.rank() == victim:
    os.kill(pid, signal.SIGSTOP)
started = time.monotonic()
try:
    cc.allreduce(ones, name="for good")
except cc.CollectiveError as error:
    common.report(error=str(error), kind=error.kind, ranks=list(error.ranks), waited=time.monotonic() - started)
time.sleep(1.0)  # so that all have raised
os.kill(pid, signal.SIGKILL)
os._exit(0)
