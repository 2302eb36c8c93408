"""Ctrl-C while rank 0 is blocked, where the others do not come. argv: in what."""

import os
import signal
import sys
import threading
import time

import common
import numpy as np
from collective_core.runtime import operations

import collective_core as cc
from collective_core import _native

data = np.ones(5)


def with_something_queued():
    """Then the engine's own thread runs it."""
    operations.run(_native.operation(_native.BARRIER, "second", "uint8", (), 0))


sent = []


def interrupt():
    sent.append(time.monotonic())
    os.kill(os.getpid(), signal.SIGINT)


CASES = {
    "init": cc.init,
    "allreduce": lambda: cc.allreduce(data, name="x"),
    "prepared": lambda: cc.allreduce(data, op=cc.Sum, out=data),
    "barrier": cc.barrier,
    "allgather": lambda: cc.allgather(data),
    "join": cc.join,
    "queued": with_something_queued,
}
case = sys.argv[1]
if case != "init":
    cc.init()
    for _ in range(2):
        cc.allreduce(data, op=cc.Sum, out=data)
    cc.barrier()
if case == "init" or cc.rank() == 0:
    if case == "queued":
        first = _native.operation(_native.BARRIER, "first", "uint8", (), 0)
        _native.submit(first)
    threading.Timer(0.5, interrupt).start()
    try:
        CASES[case]()
        raise RuntimeError("not interrupted")
    except KeyboardInterrupt:
        waited = time.monotonic() - sent[0]
    common.report(waited=waited)
else:
    while True:
        try:
            _native.check_peers(0)
            time.sleep(0.02)
        except cc.CollectiveError as error:
            common.report(kind=error.kind, ranks=list(error.ranks), error=str(error))
            os._exit(0)  # a look is no operation that has failed: MPI would be told to end with rank 0
cc.shutdown()
