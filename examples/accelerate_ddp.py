"""A training loop of Hugging Face Accelerate over the engine.

torchrun --nproc-per-node 2 examples/accelerate_ddp.py
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_data(count, seed):
    """Samples scattered around ten points of a space of 64 dimensions."""
    centres = torch.randn(10, 64, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    return TensorDataset(centres[labels] + torch.randn(count, 64, generator=generator), labels)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=3)
given = parser.parse_args()

dist.init_process_group("collective")  # Accelerate uses a process group that is there, and would choose "gloo" itself
accelerator = Accelerator(cpu=not torch.cuda.is_available())  # without a GPU it uses no process group unless told so

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
# From here on the loaders give each rank its part of the data, and the model sums its gradients.
model, optimizer, train, test = accelerator.prepare(
    model,
    optimizer,
    DataLoader(make_data(2048, seed=1), batch_size=32, shuffle=True),
    DataLoader(make_data(512, seed=2), batch_size=64),
)

for epoch in range(given.epochs):
    for rows, labels in train:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(rows), labels)
        accelerator.backward(loss)
        optimizer.step()
    mean_loss = accelerator.reduce(loss.detach(), "mean")
    accelerator.print(f"epoch {epoch + 1}: loss {mean_loss:.3f}", flush=True)

right = []
with torch.no_grad():
    for rows, labels in test:
        right.append(accelerator.gather_for_metrics(model(rows).argmax(1) == labels))
accuracy = torch.cat(right).float().mean()
weights = sum(parameter.detach().double().sum().item() for parameter in model.parameters())
rank, size = accelerator.process_index, accelerator.num_processes
print(f"rank {rank} of {size}: accuracy {accuracy:.3f}, sum of weights {weights:.9f}", flush=True)
accelerator.end_training()  # ends the process group, too
