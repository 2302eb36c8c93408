"""One step in the middle rebuilds an index, in Python, for 40 seconds."""
import time

import torch
import torch.distributed as dist


def rebuild_index(seconds):
    index, n, end = {}, 0, time.monotonic() + seconds
    while time.monotonic() < end:
        index[n % 5003] = n * n % 7919
        n += 1
    return len(index)


dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(25):
    if step == 12 and rank == 1:
        print("entries:", rebuild_index(40), flush=True)
    loss = model(torch.randn(8, 8)).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    time.sleep(0.2)
    print(f"rank {rank} step {step} loss {loss.item():.4f}", flush=True)
dist.destroy_process_group()
