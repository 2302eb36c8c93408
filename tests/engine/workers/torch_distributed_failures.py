"""Errors of the backend `collective`. Argument: the case."""

import datetime
import os
import signal
import sys
import time

import common
import torch
import torch.distributed as dist

case = sys.argv[1]
dist.init_process_group("collective", timeout=datetime.timedelta(seconds=300 if case.startswith("stops") else 30))
rank = dist.get_rank()
pid = torch.tensor([os.getpid()])
dist.broadcast(pid, 1)
begin = time.monotonic()


def run():
    if case == "shapes":
        dist.all_reduce(torch.ones(3 + rank))
    elif case == "kinds":
        dist.all_reduce(torch.ones(3)) if rank else dist.broadcast(torch.ones(3), 0)
    elif case == "type":
        dist.all_reduce(torch.ones(3).to(torch.float8_e5m2))
    elif case == "length":
        dist.send(torch.ones(3), 1) if rank == 0 else dist.recv(torch.ones(4), 0)
    elif case == "wait" and rank == 0:
        dist.all_reduce(torch.ones(3), async_op=True).wait(datetime.timedelta(seconds=0.5))
    elif case == "wait":
        time.sleep(1.5)
    elif rank == 1 and case == "leaves-recv":
        dist.destroy_process_group()
        sys.exit(0)
    elif rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP if case.startswith("stops") else signal.SIGKILL)
    elif case == "stops-send":
        dist.send(torch.ones(10_000_000), 1)  # more than the system keeps
    else:
        dist.all_reduce(torch.ones(3)) if case == "dies-allreduce" else dist.recv(torch.ones(3), 1)


try:
    run()
    common.report(kind="none", error="", ranks=[], seconds=0)
except RuntimeError as error:
    common.report(kind=error.kind, error=str(error), ranks=error.ranks, seconds=time.monotonic() - begin)
if case.startswith("stops"):
    os.kill(int(pid), signal.SIGKILL)
if case == "shapes":  # the group goes on
    dist.barrier()
    dist.destroy_process_group()
