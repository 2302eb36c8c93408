"""Tensors over two addresses of every host. Reports a digest of sums, and how many connections there are from 127.0.0.1 to it."""

import contextlib
import hashlib
import os
import socket

import common
import numpy as np

import collective_core as cc

cc.init()
everyone = [common.values(r, 300_001, "float32") for r in range(cc.size())]
total = cc.allreduce(everyone[cc.rank()], op=cc.Sum)
assert total.tobytes() == common.sum_in_rank_order(everyone).tobytes()
assert cc.broadcast(everyone[cc.rank()], 1).tobytes() == everyone[1].tobytes()
assert cc.broadcast(np.tile(everyone[cc.rank()], 3), 1).tobytes() == np.tile(everyone[1], 3).tobytes()
assert cc.allgather(everyone[cc.rank()]).tobytes() == np.concatenate(everyone).tobytes()

between = 0  # the ends that are 127.0.0.1: of what goes to 127.0.0.2 only the caller's is
for fd in map(int, os.listdir("/proc/self/fd")):
    # Each is asked: while other programs open and close connections, a reader of the kernel's table may miss some.
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
        between += connection.family == socket.AF_INET and {connection.getsockname()[0], connection.getpeername()[0]} == {"127.0.0.1"}
common.report(digest=hashlib.sha256(total.tobytes()).hexdigest(), between=between)
cc.shutdown()
