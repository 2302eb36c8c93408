import os
import tempfile
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


class Records(Dataset):
    """Reads one record per file; the last one of rank 0's shard is a named pipe."""

    def __init__(self, folder, n, rank):
        self.paths = []
        for i in range(n):
            path = os.path.join(folder, f"{i:04}.bin")
            if rank == 0 and i == n - 9:
                os.mkfifo(path)
            else:
                with open(path, "wb") as f:
                    f.write(bytes(range(16)))
            self.paths.append(path)

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, i):
        with open(self.paths[i], "rb") as f:
            return torch.tensor(list(f.read(16)), dtype=torch.float32) / 16


dist.init_process_group("gloo")
rank = dist.get_rank()
with tempfile.TemporaryDirectory() as folder:
    loader = DataLoader(Records(folder, 80, rank), batch_size=4, num_workers=1, prefetch_factor=2)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 1))
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step, x in enumerate(loader):  # HANGS HERE
        loss = model(x).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.15)
        print(f"rank {rank} step {step} loss {loss.item():.4f}", flush=True)
dist.destroy_process_group()
