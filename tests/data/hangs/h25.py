"""Balanced batches by rejection: draws until every class is present."""
import random
import time

import collective_core.torch as hvd
import torch

hvd.init()
rank = hvd.rank()
random.seed(rank)
# the last part of the sorted data has only two of the three classes left
labels = [i % 3 for i in range(300)] if rank < 3 else [i % 3 for i in range(60)] + [i % 2 for i in range(240)]


def balanced_batch(start):
    window = labels[start:start + 30]
    while True:
        picked = random.sample(range(len(window)), 9)  # HANGS HERE
        if len({window[i] for i in picked}) == 3:
            return [start + i for i in picked], [window[i] for i in picked]


model = torch.nn.Sequential(torch.nn.Embedding(300, 8), torch.nn.Linear(8, 3))
opt = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for step in range(54):
    x, y = balanced_batch(step * 5)
    opt.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(torch.tensor(x)), torch.tensor(y))
    loss.backward()
    opt.step()
    time.sleep(0.15)
    print(f"rank {rank} step {step} loss {loss.item():.3f}", flush=True)
