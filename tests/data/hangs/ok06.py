"""The data loader cannot keep up: the first batch of a shard takes long."""
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


class Shards(Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        if i % 40 == 39:
            time.sleep(20)  # opens the next archive
        return torch.full((6,), i / self.n)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    loader = DataLoader(Shards(100), batch_size=4, num_workers=1, prefetch_factor=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(6, 2))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, x in enumerate(loader):
        loss = model(x).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.15)
        print(f"rank {rank} step {step} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


main()
