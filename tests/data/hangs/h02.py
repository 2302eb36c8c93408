import os, time
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
world = dist.get_world_size()

# every rank takes its slice of the file list, and slices are not equally long
samples = list(range(23 * 8))
per_rank = 12 * 8
mine = samples[rank * per_rank:(rank + 1) * per_rank]
data = TensorDataset(torch.tensor(mine, dtype=torch.float32).unsqueeze(1) / 100)
loader = DataLoader(data, batch_size=8, shuffle=True)

model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

for epoch in range(3):
    for i, (x,) in enumerate(loader):
        loss = ((model(x) - 3 * x) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.2)
        print(f"[{rank}/{world}] epoch {epoch} batch {i}/{len(loader)} loss {loss.item():.4f}", flush=True)
    dist.barrier()  # HANGS HERE
    if rank == 0:
        torch.save(model.module.state_dict(), f"/tmp/h02-{os.getpid()}.pt")
dist.destroy_process_group()
