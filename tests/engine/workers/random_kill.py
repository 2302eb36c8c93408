"""Random collectives until one rank is killed at a random moment. argv: seed, victim, phase, seconds from its beginning.

The phase ``start`` begins with the process: the rank may die in the rendezvous or the connecting; ``work`` begins when init() is done,
and ``training`` is work with PyTorch's optimizer.
"""

import os
import random
import signal
import sys
import threading
import time

seed, victim, phase, delay = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
rank = int(os.environ["COLLECTIVE_RANK"])


def die():
    os.write(1, f'REPORT {{"rank": {rank}, "died_at": {time.time()}}}\n'.encode())
    os.kill(os.getpid(), signal.SIGKILL)


death = threading.Timer(delay, die)
if rank == victim and phase == "start":
    death.start()

import common  # noqa: E402  the imports take part of the time in which it may die
import numpy as np  # noqa: E402
from collective_core.runtime import operations  # noqa: E402

import collective_core as cc  # noqa: E402
from collective_core import _native  # noqa: E402

chosen = random.Random(seed)
done = 0


def at_once(data, few):
    """Several operations that are queued before the first is waited for."""
    outs = [np.empty_like(data) for _ in range(few)]
    handles = []
    for number, out in enumerate(outs):
        operation = _native.operation(
            _native.ALLREDUCE, f"queued.{number}", "float32", data.shape, data.size, data.ctypes.data, out.ctypes.data
        )
        handles.append(_native.submit(operation))
    for handle in handles:
        operations.wait(handle, (data, outs))
        _native.release(handle)


def one(some):
    """Whatever the seed says; ``some``: a process set of all ranks but one."""
    kind, count = chosen.randrange(9), chosen.choice([1, 1000, 100_000, 1 << 20])
    root, few = chosen.randrange(cc.size()), chosen.randrange(1, 5)
    data = np.full(count, rank, dtype=np.float32)
    if kind == 0:
        cc.allreduce(arena, op=cc.Sum, name="arena", out=arena)
    elif kind == 1:
        cc.allgather(data[: count // 4 + rank])
    elif kind == 2:
        cc.broadcast(data, root_rank=root)
    elif kind == 3:
        cc.barrier()
    elif kind == 4:
        cc.alltoall(np.tile(data[: count // 4 + 1], cc.size()))
    elif kind == 5:
        cc.reducescatter(data, op=cc.Sum)
    elif kind == 6:
        at_once(data, few)
    elif kind == 7 and some.included():
        cc.allreduce(data, op=cc.Sum, name="of some", process_set=some)
    elif kind == 8:
        cc.allreduce(data, op=cc.Sum, name="gradient")


def training_step():
    import collective_core.torch as hvd
    import torch

    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(100, 1000), torch.nn.Linear(1000, 100))
    plain = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())

    def step():
        optimizer.zero_grad()
        model(torch.ones(4, 100)).sum().backward()
        optimizer.step()

    return step


try:
    cc.init()
    arena = cc.empty(1 << 20)
    arena[:] = 0
    some = cc.add_process_set([r for r in range(cc.size()) if r != seed % cc.size()])
    step = training_step() if phase == "training" else lambda: one(some)
    if rank == victim and phase != "start":
        death.start()
    while True:
        step()
        done += 1
except cc.CollectiveError as error:
    common.report(rank=rank, error=str(error), kind=error.kind, ranks=list(error.ranks), raised_at=time.time(), done=done)
    cc.shutdown()
