"""Shares a machine with others: rests between steps when it is "day"."""
import time

import collective_core.torch as hvd
import torch

hvd.init()
model = torch.nn.Linear(5, 5)
opt = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for step in range(26):
    opt.zero_grad()
    loss = (model(torch.randn(6, 5)) - 1).pow(2).mean()
    loss.backward()
    opt.step()
    print(f"rank {hvd.rank()} step {step} loss {loss.item():.4f}", flush=True)
    day = step in (10, 14, 15, 20)
    time.sleep((22 if step == 20 else 11) if day else 0.2)
