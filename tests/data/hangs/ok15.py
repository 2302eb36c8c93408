"""Uneven data with hvd.join: rank 1 is done after 10 steps, rank 0 goes on for a while."""
import time

import collective_core.torch as hvd
import torch

hvd.init()
rank = hvd.rank()
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
opt = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
steps = 10 if rank == 1 else 20
for step in range(steps):
    x = torch.randn(10, 4)
    opt.zero_grad()
    loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
    loss.backward()
    opt.step()
    time.sleep(0.2 if step < 12 else 4.5)  # later batches have longer sequences
    print(f"rank {rank} step {step} loss {loss.item():.4f}", flush=True)
last = hvd.join()
print(f"rank {rank}: the last to join was {last}", flush=True)
