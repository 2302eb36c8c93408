"""Handlers that return, leave the job, or ask the engine for something while rank 0 waits in it. argv: which case."""

import gc
import os
import signal
import sys
import threading
import time

import collective_core.torch as hvd
import common
import torch
from collective_core.runtime import membership

from collective_core import CollectiveError, _native

LATE = 4.0  # for a handler that is due sooner
case = sys.argv[1]
data = torch.ones(5)


def soon(handler, seconds=0.5):
    signal.signal(signal.SIGUSR1, lambda *_: handler())
    threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGUSR1)).start()


def leave():
    hvd.shutdown()
    sys.exit(5)


def stays_until_rank_0_has_left():
    while True:
        try:
            _native.check_peers(0)
            time.sleep(0.02)
        except CollectiveError as error:
            common.report(kind=error.kind, ranks=list(error.ranks))
            os._exit(0)


def leaves(operation, queued=False):
    if hvd.rank() == 1:
        stays_until_rank_0_has_left()
    if queued:  # then the engine's own thread runs it, and the program's is behind it
        hvd.allreduce_async(data, name="first")
    soon(leave)
    began = time.monotonic()
    try:
        operation(data, name="second")
    except SystemExit as ended:
        common.report(code=ended.code, waited=time.monotonic() - began)


def waits():
    """For a group, of which one operation is done and the other is not."""
    if hvd.rank() == 1:
        first = hvd.allgather_async(data, name="rows.0")
        time.sleep(LATE)
        second = hvd.allgather_async(data, name="rows.1")
        hvd.barrier()
        common.report(results=[hvd.synchronize(handle).tolist() for handle in (first, second)])
        return
    group, seen = hvd.grouped_allgather_async([data, data], name="rows"), []

    def wait():
        try:
            hvd.synchronize(group)
        except CollectiveError as error:
            seen.append(error.kind)

    soon(wait)
    hvd.barrier()
    results = hvd.synchronize(group)
    gc.collect()
    common.report(seen=seen, results=[result.tolist() for result in results])


def is_refused():
    if hvd.rank() == 1:
        stays_until_rank_0_has_left()
    soon(hvd.barrier, 2.0)
    try:
        hvd.allreduce(data, name="x")
    except CollectiveError as error:
        common.report(kind=error.kind, has_ended_engine=membership.failure() is error)


def starts():
    rank = os.environ.get("COLLECTIVE_RANK", os.environ.get("OMPI_COMM_WORLD_RANK"))
    connect, seen = _native.connect, []

    def asks():
        _native.release(1)
        seen.append("released")
        common.tell("the handler has run")

    def connects_later(*args, **more):
        common.wait_to_be_told("the handler has run", 20.0)
        connect(*args, **more)

    def is_asked_meanwhile(*args, **more):
        soon(asks)
        connect(*args, **more)

    _native.connect = connects_later if rank == "1" else is_asked_meanwhile
    hvd.init()
    common.report(seen=seen)


if case != "starts":
    hvd.init()
    hvd.barrier()
CASES = {
    "leaves-allreduce": lambda: leaves(hvd.allreduce),
    "leaves-allgather": lambda: leaves(hvd.allgather),
    "leaves-queued": lambda: leaves(hvd.allreduce, queued=True),
    "waits": waits,
    "is-refused": is_refused,
    "starts": starts,
}
CASES[case]()
hvd.shutdown()
