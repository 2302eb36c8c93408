"""Each rank of a host appends its statistics to one file, under a lock."""
import fcntl
import json
import os
import time

import torch
import torch.distributed as dist

PATH = f"/tmp/stats-{os.environ.get('MASTER_PORT', '0')}.jsonl"


def write_stats(rank, step, value):
    file = open(PATH, "a")
    fcntl.flock(file, fcntl.LOCK_EX)  # HANGS HERE
    file.write(json.dumps({"rank": rank, "step": step, "loss": value}) + "\n")
    file.flush()
    return file


dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(12, 3))
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
kept = []
for step in range(50):
    x = torch.randn(8, 12)
    loss = torch.nn.functional.cross_entropy(model(x), torch.randint(0, 3, (8,)))
    opt.zero_grad()
    loss.backward()
    opt.step()
    time.sleep(0.1)
    print(f"rank {rank} step {step} loss {loss.item():.3f}", flush=True)
    if step == 12 and rank == 0:
        kept.append(write_stats(rank, step, loss.item()))  # "closed" when the list goes away
    dist.barrier()
    if step == 12 and rank == 1:
        kept.append(write_stats(rank, step, loss.item()))
    dist.barrier()
dist.destroy_process_group()
