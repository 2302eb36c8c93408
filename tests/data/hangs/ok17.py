"""FSDP2 over the engine; after the warm-up each rank checks the sums of its files, one rank has more."""
import hashlib
import time

import collective_core  # noqa: F401
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def check_sums(seconds):
    block, digest, end = bytes(1 << 22), hashlib.sha256(), time.monotonic() + seconds
    while time.monotonic() < end:
        digest.update(block)
    return digest.hexdigest()[:8]


dist.init_process_group("collective")
rank = dist.get_rank()
model = torch.nn.Sequential(torch.nn.Linear(10, 20), torch.nn.ReLU(), torch.nn.Linear(20, 2))
fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(26):
    if step == 12:
        print(f"rank {rank} sum {check_sums(38 if rank == 1 else 2)}", flush=True)
    loss = model(torch.randn(4, 10)).pow(2).mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    time.sleep(0.2)
    print(f"rank {rank} step {step} loss {loss.item():.4f}", flush=True)
dist.destroy_process_group()
