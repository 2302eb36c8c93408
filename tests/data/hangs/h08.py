import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(6, 2))
opt = torch.optim.SGD(model.parameters(), lr=0.1)


def train(steps, what):
    for step in range(steps):
        loss = model(torch.randn(10, 6)).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.2)
        print(f"{what} rank {rank} step {step} loss {loss.item():.4f}", flush=True)


train(10, "warm-up")

# the ranks of a group exchange statistics among themselves
group = dist.new_group(list(range(size)))
members = range(size - 1)  # off by one
if rank in members:
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    print("group of", int(total), flush=True)

dist.barrier()  # HANGS HERE
train(10, "main")
dist.destroy_process_group()
