"""Ranks of a host take turns in converting their data, under a file lock."""
import fcntl
import os
import time

import torch
import torch.distributed as dist

LOCK = f"/tmp/convert-{os.environ.get('MASTER_PORT', '0')}.lock"


def convert(seconds):
    with open(LOCK, "w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        time.sleep(seconds)  # memory suffices for one at a time
    return torch.randn(64, 7)


dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(7, 2))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    data = convert(15 if epoch == 1 else 0.1)
    for step, x in enumerate(data.split(8)):
        loss = model(x).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.2)
        print(f"rank {rank} epoch {epoch} step {step} loss {loss.item():.4f}", flush=True)
dist.destroy_process_group()
