"""One rank is stopped in the middle of an allreduce; the others must raise after COLLECTIVE_TIMEOUT. argv: which."""

import os
import signal
import sys
import threading
import time

import common
import numpy as np

import collective_core as cc

victim = int(sys.argv[1])
cc.init()
pid = int(cc.broadcast(np.array([os.getpid()]), victim)[0])
data = np.zeros(16_000_000, dtype=np.float32)
if cc.rank() == victim:
    common.report(pid=pid)
    threading.Timer(0.3, lambda: os.kill(pid, signal.SIGSTOP)).start()
try:
    while True:
        started = time.monotonic()
        cc.allreduce(data, op=cc.Sum, name="gradient", out=data)
except cc.CollectiveError as error:
    common.report(error=str(error), kind=error.kind, ranks=list(error.ranks), waited=time.monotonic() - started)
time.sleep(1.0)  # so that all have raised
os.kill(pid, signal.SIGKILL)
os._exit(0)
