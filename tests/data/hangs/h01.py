"""DDP on CPUs with an evaluation at the end of each epoch."""
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def evaluate(model, world):
    model.eval()
    hits = torch.zeros(1)
    with torch.no_grad():
        x = torch.randn(64, 16)
        hits += (model(x).argmax(1) == 0).sum()
    parts = [torch.zeros(1) for _ in range(world)]
    dist.all_gather(parts, hits)  # HANGS HERE
    model.train()
    return sum(p.item() for p in parts) / (64 * world)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    model = DDP(net)
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(5):
        for step in range(8):
            x, y = torch.randn(32, 16), torch.randint(0, 4, (32,))
            loss = torch.nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            time.sleep(0.15)
            print(f"rank {rank} epoch {epoch} step {step} loss {loss.item():.3f}", flush=True)
        if rank == 0:  # only the first rank prints it
            print("accuracy", evaluate(net, world), flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    print("host", os.uname().nodename, flush=True)
    main()
