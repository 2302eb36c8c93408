"""Tensors over two addresses of every host. Reports a digest of sums, and how many connections there are from 127.0.0.1 to it."""

import hashlib
import os
import socket
from pathlib import Path

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

mine = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}
between = 0  # the ends that are 127.0.0.1: of what goes to 127.0.0.2 only the caller's is
for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
    _, *ends, state, _, _, _, _, _, inode = line.split()[:10]
    is_mine = state == "01" and f"socket:[{inode}]" in mine
    between += is_mine and all(socket.inet_ntoa(bytes.fromhex(end.split(":")[0])[::-1]) == "127.0.0.1" for end in ends)
common.report(digest=hashlib.sha256(total.tobytes()).hexdigest(), between=between)
cc.shutdown()
