"""Rank 0 prepares a cache file, the other ranks of the host poll for it."""
import os
import time

import collective_core.torch as hvd
import torch

hvd.init()
job = hvd.broadcast_object(os.getpid(), root_rank=0)
path = f"/tmp/tokens-{job}.pt"
model = torch.nn.Embedding(100, 8)
opt = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)


def train(tokens, steps):
    for step in range(steps):
        x = tokens[torch.randint(0, len(tokens), (8,))]
        opt.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        opt.step()
        time.sleep(0.2)
        print(f"rank {hvd.rank()} step {step} loss {loss.item():.4f}", flush=True)


train(torch.arange(50), 10)
if hvd.rank() == 0:
    pieces = []
    for _ in range(64):  # tokenizes for half a minute
        pieces.append(torch.randint(0, 100, (32,)))
        time.sleep(0.5)
    torch.save(torch.cat(pieces), path + ".part")
    os.rename(path + ".part", path)
while not os.path.exists(path):
    time.sleep(0.5)
train(torch.load(path), 10)
if hvd.rank() == 0:
    os.remove(path)
