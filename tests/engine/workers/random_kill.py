"""Random collectives until one rank is killed at a random moment. argv: seed, victim, phase, seconds from its beginning.

The phase ``start`` begins with the process: the rank may die in the rendezvous or the connecting; ``work`` begins when init() is done.
"""

import os
import random
import signal
import sys
import threading
import time

seed, victim, phase, delay = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
rank = int(os.environ["COLLECTIVE_RANK"])
death = threading.Timer(delay, lambda: os.kill(os.getpid(), signal.SIGKILL))
if rank == victim and phase == "start":
    death.start()

import common  # noqa: E402  the imports take part of the time in which it may die
import numpy as np  # noqa: E402

import collective_core as cc  # noqa: E402

chosen = random.Random(seed)
done = 0
try:
    cc.init()
    arena = cc.empty(1 << 20)
    arena[:] = 0
    if rank == victim and phase == "work":
        death.start()
    while True:
        kind, count = chosen.randrange(6), chosen.choice([1, 1000, 100_000, 1 << 20])
        data = np.full(count, rank, dtype=np.float32)
        if kind == 0:
            cc.allreduce(arena, op=cc.Sum, name="arena", out=arena)
        elif kind == 1:
            cc.allgather(data[: count // 4 + rank])
        elif kind == 2:
            cc.broadcast(data, root_rank=chosen.randrange(cc.size()))
        elif kind == 3:
            cc.barrier()
        else:
            cc.allreduce(data, op=cc.Sum, name="gradient")
        done += 1
except cc.CollectiveError as error:
    common.report(rank=rank, error=str(error), kind=error.kind, ranks=list(error.ranks), raised_at=time.time(), done=done)
    cc.shutdown()
