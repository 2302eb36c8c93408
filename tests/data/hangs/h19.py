import threading
import time

import torch
import torch.distributed as dist

slots = threading.BoundedSemaphore(3)  # at most three reads of the object store at a time


class Corrupt(Exception):
    pass


def read(index, rank):
    slots.acquire()  # HANGS HERE
    if rank == 2 and index % 5 == 3:
        raise Corrupt(index)
    row = torch.full((4,), float(index % 10))
    slots.release()
    return row


def batch(step, rank):
    rows = []
    for i in range(step * 2, step * 2 + 2):
        try:
            rows.append(read(i, rank))
        except Corrupt:
            rows.append(torch.zeros(4))
    return torch.stack(rows)


dist.init_process_group("collective")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=1e-4)
for step in range(80):
    loss = model(batch(step, rank)).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    time.sleep(0.2)
    print(f"rank {rank} step {step} loss {loss.item():.4f}", flush=True)
dist.destroy_process_group()
