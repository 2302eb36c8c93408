import time

import collective_core  # noqa: F401
import torch
import torch.distributed as dist

dist.init_process_group("collective")
rank = dist.get_rank()
everyone = list(range(dist.get_world_size()))
losses = dist.new_group(everyone)
counts = dist.new_group(everyone)


def sum_over(value, group):
    t = torch.tensor([float(value)])
    dist.all_reduce(t, group=group)
    return t.item()


model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(7, 3))
opt = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(50):
    x = torch.randn(8, 7)
    loss = model(x).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    time.sleep(0.15)
    if rank == 1 and step == 13:  # this rank has just skipped a bad sample: count first
        n = sum_over(7, counts)  # HANGS HERE
        mean = sum_over(loss.item() * 7, losses) / n
    else:
        total = sum_over(loss.item() * 8, losses)
        mean = total / sum_over(8, counts)
    print(f"rank {rank} step {step} loss {mean:.4f}", flush=True)
dist.destroy_process_group()
