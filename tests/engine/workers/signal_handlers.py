"""Handlers that return, leave the job, or ask the engine for something while rank 0 waits in it. argv: which case."""

import os
import signal
import sys
import threading
import time

import collective_core.torch as hvd
import common
import torch

from collective_core import CollectiveError, _native

case = sys.argv[1]
data = torch.ones(5)


def in_half_a_second(handler):
    signal.signal(signal.SIGUSR1, lambda *_: handler())
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGUSR1)).start()


def leave():
    hvd.shutdown()
    sys.exit(5)


def stays_until_rank_0_has_left():
    while True:
        try:
            _native.look_around(0)
            time.sleep(0.02)
        except CollectiveError as error:
            common.report(kind=error.kind, ranks=list(error.ranks))
            os._exit(0)


def leaves(operation, queued=False):
    if hvd.rank() == 1:
        stays_until_rank_0_has_left()
    if queued:  # then the engine's own thread runs it, and the program's is behind it
        hvd.allreduce_async(data, name="first")
    in_half_a_second(leave)
    began = time.monotonic()
    try:
        operation(data, name="second")
    except SystemExit as ended:
        common.report(code=ended.code, waited=time.monotonic() - began)


def waits():
    if hvd.rank() == 1:
        time.sleep(1.5)
    later = hvd.allreduce_async(data, name="later", op=hvd.Sum)
    seen = []

    def wait():
        try:
            hvd.synchronize(later)
        except CollectiveError as error:
            seen.append(error.kind)

    if hvd.rank() == 0:
        in_half_a_second(wait)
    hvd.barrier()
    common.report(seen=seen, result=hvd.synchronize(later).tolist())


def starts():
    rank, connect, seen = os.environ.get("COLLECTIVE_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")), _native.connect, []
    if rank == "1":
        _native.connect = lambda *args, **more: (time.sleep(1.5), connect(*args, **more))
    else:

        def asks():
            _native.release(1)
            seen.append("released")

        def connect_later(*args, **more):
            in_half_a_second(asks)
            connect(*args, **more)

        _native.connect = connect_later
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
    "starts": starts,
}
CASES[case]()
hvd.shutdown()
