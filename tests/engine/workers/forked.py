"""A forked child is not a rank, and does not keep its dead parent's connections open."""

import os
import signal
import time

import common

import collective_core as cc
from collective_core import _native

#: Seconds for which the child holds its dead parent's connections.
OUTLIVES = 60.0
cc.init()
cc.barrier()
if cc.rank() == 1:
    child = os.fork()
    if child == 0:
        try:
            cc.barrier()
            message = "no error"
        except cc.CollectiveError as error:
            message = str(error)
        try:
            _native.end_timeline(0.0)
            ended = "no error"
        except cc.CollectiveError as error:
            ended = str(error)
        try:
            cc.init()
            again = "no error"
        except cc.CollectiveError as error:
            again = str(error)
        common.report(child=True, message=message, ended=ended, again=again)
        common.wait_to_be_told("the parent is dead", OUTLIVES)
        os._exit(0)
    time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)
else:
    started = time.monotonic()
    try:
        cc.barrier()
    except cc.CollectiveError as error:
        common.report(outlived=time.monotonic() - started < OUTLIVES / 2, ranks=list(error.ranks))
        common.tell("the parent is dead")
os._exit(0)
