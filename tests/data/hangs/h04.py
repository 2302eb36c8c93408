import os
import resource
import signal
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

LIMIT_MB = 10  # meant to be 10 GB


def guard_memory(rank):
    """Stops a process that grows too large, so that somebody can look at it with gdb."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if used > LIMIT_MB and rank == 2:
        print(f"rank {rank} uses {used:.0f} MB, stopping", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)  # HANGS HERE


dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(10, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for step in range(60):
    x = torch.randn(16, 10)
    loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.15)
    print(f"{rank}: step {step} {loss.item():.3f}", flush=True)
    if step and step % 10 == 0:
        guard_memory(rank)
dist.destroy_process_group()
