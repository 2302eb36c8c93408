"""Ctrl-C in every call in which a program waits for other ranks, one after the other in one job. One rank waits; the others do not come.
Argument: which one waits.
"""

import os
import signal
import sys
import threading
import time

import collective_core.torch as hvd
import common
import torch

from collective_core import _native

waiting = int(sys.argv[1])
tensor = torch.ones(5)
large = torch.ones(1 << 20)
CASES = {
    "allreduce": lambda: hvd.allreduce(tensor, name="small"),
    "large allreduce": lambda: hvd.allreduce_(large, name="large"),
    "barrier": hvd.barrier,
    "allgather": lambda: hvd.allgather(tensor),
    "alltoall": lambda: hvd.alltoall(torch.ones(hvd.size())),
    "reducescatter": lambda: hvd.reducescatter(torch.ones(hvd.size())),
    "synchronize": lambda: hvd.synchronize(hvd.allreduce_async(tensor)),
    "join": hvd.join,
    "broadcast_object": lambda: hvd.broadcast_object({"a": 1}, root_rank=1 - min(waiting, 1)),
    "add_process_set": lambda: hvd.add_process_set(hvd.ProcessSet([0])),
}


def seconds_to_answer(call):
    sent = []

    def interrupt():
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Timer(0.2, interrupt).start()
    try:
        call()
    except KeyboardInterrupt:
        return time.monotonic() - sent[0]
    raise RuntimeError("not interrupted")


def what_ends_the_engine():
    while True:
        try:
            _native.check_peers(0)
        except hvd.CollectiveError as error:
            return error
        time.sleep(0.02)


found = {}
for name, call in CASES.items():
    late = True
    for _ in range(3):  # a busy machine may be late to answer, but hardly three times
        if not late:
            break
        hvd.init()
        hvd.barrier()
        if hvd.rank() == waiting:
            found[name] = seconds_to_answer(call)
        else:
            error = what_ends_the_engine()
            found[name] = [error.kind, error.ranks]
        hvd.shutdown()
        hvd.init()
        late = hvd.broadcast_object(hvd.rank() == waiting and found[name] > 1, waiting)
        hvd.shutdown()
hvd.init()  # so that the job ends well
hvd.barrier()
common.report(found=found)
