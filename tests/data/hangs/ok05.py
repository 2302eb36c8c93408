"""One machine is much slower than the others, and now and then slower still."""
import random
import time

import collective_core.torch as hvd
import torch

hvd.init()
rank = hvd.rank()
random.seed(rank)
model = torch.nn.Sequential(torch.nn.Linear(12, 24), torch.nn.ReLU(), torch.nn.Linear(24, 1))
opt = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=1e-3), named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)


def compute_time(step):
    if rank != hvd.size() - 1:
        return random.uniform(0.05, 0.3)
    return 18.0 if step in (14, 19) else random.uniform(0.5, 2.0)


for step in range(26):
    x = torch.randn(16, 12)
    opt.zero_grad()
    loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
    time.sleep(compute_time(step))
    loss.backward()
    opt.step()
    mean = hvd.allreduce(loss.detach(), name="loss")
    print(f"rank {rank} step {step} mean loss {mean.item():.4f}", flush=True)
