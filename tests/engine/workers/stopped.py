"""A rank is stopped; the others must raise. argv: which, and `inside` an allreduce or `before` one, after a first stop that ends."""

import os
import signal
import subprocess
import sys
import threading
import time

import common
import numpy as np

import collective_core as cc

victim, when = int(sys.argv[1]), sys.argv[2]
cc.init()
pid = int(cc.broadcast(np.array([os.getpid()]), victim)[0])
data = np.zeros(16_000_000 if when == "inside" else 10, dtype=np.float32)
if cc.rank() == victim:
    common.report(pid=pid)
    if when == "inside":
        threading.Timer(0.3, lambda: os.kill(pid, signal.SIGSTOP)).start()
    else:  # by another process: this one stands still
        subprocess.Popen(["sh", "-c", f"kill -STOP {pid}; sleep 12; touch $TEST_REPORTS/continued; kill -CONT {pid}"])
        common.wait_to_be_told("continued")
if when == "before":
    cc.allreduce(data, name="for a while")
    if cc.rank() == victim:
        os.kill(pid, signal.SIGSTOP)
try:
    while True:
        started = time.monotonic()
        cc.allreduce(data, op=cc.Sum, name="gradient", out=data)
except cc.CollectiveError as error:
    common.report(error=str(error), kind=error.kind, ranks=list(error.ranks), waited=time.monotonic() - started)
time.sleep(1.0)  # so that all have raised
os.kill(pid, signal.SIGKILL)
os._exit(0)
