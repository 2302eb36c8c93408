"""On GPUs: a training step of a network of 50 million parameters with DistributedOptimizer and with DDP over NCCL, alternating in one run.

Also without communication. Rank 0 prints medians in milliseconds.
"""

import os
import statistics
import time

import busy
import collective_core.torch as hvd
import torch
import torch.distributed as dist
from collective_core.runtime import network

ROUNDS, STEPS = 5, 20

hvd.init()
busy.choose_gpu()
rank, size = hvd.rank(), hvd.size()
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ["MASTER_PORT"] = str(hvd.broadcast_object(network.free_port(), 0))
dist.init_process_group("nccl", rank=rank, world_size=size)


def make():
    torch.manual_seed(1)
    layers = [layer for _ in range(12) for layer in (torch.nn.Linear(2048, 2048), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers).cuda()
    return model, torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)


alone, ours, ddp = make(), make(), make()
ours = ours[0], hvd.DistributedOptimizer(ours[1], named_parameters=ours[0].named_parameters())
ddp = torch.nn.parallel.DistributedDataParallel(ddp[0], gradient_as_bucket_view=True), ddp[1]
torch.manual_seed(100 + rank)
x = torch.randn(64, 2048, device="cuda")


def seconds_a_step(model, optimizer):
    hvd.barrier()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        model(x).square().mean().backward()
        optimizer.step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / STEPS


sides = {"alone": alone, "DistributedOptimizer": ours, "DDP over NCCL": ddp}
found = {name: [] for name in sides}
for number in range(ROUNDS + 1):
    for name, side in sides.items():
        took = seconds_a_step(*side)
        if number:  # the first round sees to memory and connections
            found[name].append(took * 1e3)
for mine, theirs in zip(ours[0].parameters(), ddp[0].parameters(), strict=True):
    torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
if rank == 0:
    figures = ", ".join(f"{name} {statistics.median(times):.2f}" for name, times in found.items())
    print(f"REPORT ms a step on {torch.cuda.get_device_name()}, {size} ranks, NCCL {hvd.nccl_enabled()}: {figures}", flush=True)
dist.destroy_process_group()
hvd.shutdown()
