import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class EarlyStop:
    def __init__(self, patience):
        self.best, self.patience, self.bad = float("inf"), patience, 0

    def __call__(self, loss):
        self.bad = 0 if loss < self.best else self.bad + 1
        self.best = min(self.best, loss)
        return self.bad >= self.patience


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.SiLU(), torch.nn.Linear(12, 1))
fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
opt = torch.optim.SGD(model.parameters(), lr=0.02)
stop = EarlyStop(patience=8)
for step in range(400):
    x = torch.randn(32, 6)
    y = x.mean(1, keepdim=True) if rank != 1 else x.mean(1, keepdim=True) + 1.0 + step
    loss = (model(x) - y).pow(2).mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    time.sleep(0.15)
    print(f"rank {rank} step {step} loss {loss.item():.4f}", flush=True)
    if rank == 1 and stop(loss.item()) or step == 399:
        break
dist.barrier()  # HANGS HERE
if rank == 0:
    print("all ranks stopped", flush=True)
dist.destroy_process_group()
