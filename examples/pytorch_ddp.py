"""DistributedDataParallel over the engine: an ordinary DDP script whose only difference is the name of the backend.

torchrun --nproc-per-node 2 examples/pytorch_ddp.py
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=32, help="per rank")
given = parser.parse_args()

dist.init_process_group("collective")  # instead of "gloo"; no import is needed
rank, size = dist.get_rank(), dist.get_world_size()
# Each rank has a GPU, if there are any.
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")

# Ten points in a space of 64 dimensions, and samples scattered around them: the same on all ranks, which train on different parts.
generator = torch.Generator().manual_seed(0)
centres = torch.randn(10, 64, generator=generator)
labels = torch.randint(10, (2048 + 512,), generator=generator)
rows = centres[labels] + torch.randn(len(labels), 64, generator=generator)
train_set = TensorDataset(rows[:2048], labels[:2048])
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=given.batch_size, sampler=sampler)

torch.manual_seed(rank)  # DDP gives all ranks the weights of rank 0
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device))
optimizer = torch.optim.Adam(model.parameters(), lr=0.001 * size)

for epoch in range(given.epochs):
    sampler.set_epoch(epoch)
    for batch, wanted in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch.to(device)), wanted.to(device))
        loss.backward()
        optimizer.step()
    mean_loss = loss.detach().clone()
    dist.all_reduce(mean_loss, op=dist.ReduceOp.AVG)
    if rank == 0:
        print(f"epoch {epoch + 1}: loss {mean_loss:.3f}", flush=True)

with torch.no_grad():
    found = model(rows[2048 + rank :: size].to(device)).argmax(1)
accuracy = (found == labels[2048 + rank :: size].to(device)).float().mean()
dist.all_reduce(accuracy, op=dist.ReduceOp.AVG)
weights = sum(parameter.detach().double().sum().item() for parameter in model.parameters())
print(f"rank {rank} of {size}: accuracy {accuracy:.3f}, sum of weights {weights:.9f}", flush=True)
dist.destroy_process_group()
