"""Uneven inputs, with DDP's own join: the rank with less data waits, and shadows the others."""
import time

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
batches = [torch.randn(8, 5) for _ in range(10 if rank else 24)]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(5, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.05)
with Join([model]):
    for step, x in enumerate(batches):
        loss = (model(x) - x.mean(1, keepdim=True)).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.2 if step < 11 else 3)
        print(f"rank {rank} step {step} of {len(batches)} loss {loss.item():.4f}", flush=True)
print(f"rank {rank} joined", flush=True)
dist.barrier()
dist.destroy_process_group()
