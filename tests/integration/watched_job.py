"""A job for the tests of the watch over jobs: ``watched_job.py SHAPE SECONDS``, over the engine without PyTorch, which begins fast."""

import os
import sys
import time

import numpy

import collective_core as cc

SHAPE, SECONDS = sys.argv[1], float(sys.argv[2])
cc.init()
RANK = cc.rank()
cc.allreduce(numpy.ones(4))
print("ready", RANK, flush=True)


def compute(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))


IS_AGAIN = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "1"
if cc.size() - RANK == 1 and (SHAPE == "fifo" or (SHAPE == "fifo_once" and not IS_AGAIN)):
    if not os.path.exists("data"):
        os.mkfifo("data")
    os.open("data", os.O_RDONLY)  # STANDS
if SHAPE == "busy_threads" and RANK == 1:  # it waits for a lock, another thread has work to do
    import threading

    threading.Thread(target=compute, args=(SECONDS,)).start()
    threading.Event().wait(SECONDS)
if SHAPE == "evaluation" and RANK == 0:
    compute(SECONDS)
if SHAPE == "uneven":
    for _step in range(int(SECONDS)):
        compute(0.5 + RANK)
        cc.allreduce(numpy.ones(1 << 16))
if SHAPE == "compiles" and RANK == 0:  # the rank waits for a compiler
    import subprocess

    program = f"import time\nend = time.monotonic() + {SECONDS}\nwhile time.monotonic() < end: sum(range(1000))"
    subprocess.run([sys.executable, "-c", program], check=True)
if SHAPE == "sleeps":  # all of them: nobody waits for another
    time.sleep(SECONDS)
cc.allreduce(numpy.ones(4))
print("done", RANK, flush=True)
