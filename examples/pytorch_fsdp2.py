"""FSDP2 (``fully_shard``) over the engine: each rank holds a part of the weights, gradients and optimizer state of a small transformer.

    torchrun --nproc-per-node 2 examples/pytorch_fsdp2.py --checkpoint /tmp/fsdp2

It learns to write sequences backwards, saves its state with torch.distributed.checkpoint, and continues from there when it is started
again, also with another number of ranks.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

TOKENS, LENGTH, WIDTH = 12, 8, 64


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, batch_first=True) for _ in range(2))
        self.output = nn.Linear(WIDTH, TOKENS)

    def forward(self, sequences):
        """A score for each token in each place: [batch * LENGTH, TOKENS]."""
        x = self.tokens(sequences) + self.places(torch.arange(LENGTH, device=sequences.device))
        for block in self.blocks:
            x = block(x)
        return self.output(x.flatten(0, 1))


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=60, help="at which the training ends")
parser.add_argument("--batch-size", type=int, default=32, help="per rank")
parser.add_argument("--checkpoint", type=Path, help="folder")
given = parser.parse_args()

dist.init_process_group("collective")
rank, size = dist.get_rank(), dist.get_world_size()
# Each rank has a GPU, if there are any.
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")

torch.manual_seed(0)  # fully_shard broadcasts nothing: all ranks must start from the same weights
model = Transformer().to(device)
mesh = init_device_mesh(device.type, (size,))
for block in model.blocks:
    fully_shard(block, mesh=mesh)  # its weights are gathered when it runs, and given back afterwards
fully_shard(model, mesh=mesh)
optimizer = torch.optim.Adam(model.parameters(), lr=0.003)

start = 0
if given.checkpoint and (given.checkpoint / ".metadata").exists():
    weights, state = get_state_dict(model, optimizer)
    saved = {"model": weights, "optimizer": state, "step": 0}
    dcp.load(saved, checkpoint_id=given.checkpoint)
    set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    start = saved["step"]
    if rank == 0:
        print(f"continued after step {start}", flush=True)

for step in range(start, given.steps):
    generator = torch.Generator().manual_seed(step * size + rank)  # new data in each step, other data on each rank
    sequences = torch.randint(TOKENS, (given.batch_size, LENGTH), generator=generator).to(device)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(sequences), sequences.flip(1).flatten())
    loss.backward()
    optimizer.step()
    if rank == 0 and (step + 1) % 20 == 0:
        print(f"step {step + 1}: loss {loss:.3f}", flush=True)

if given.checkpoint:
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state, "step": given.steps}, checkpoint_id=given.checkpoint)

local = sum(parameter.to_local().numel() for parameter in model.parameters())
total = sum(parameter.numel() for parameter in model.parameters())
print(f"rank {rank}: holds {local} of {total} weights", flush=True)
weights = sum(parameter.full_tensor().detach().double().sum().item() for parameter in model.parameters())
sequences = torch.randint(TOKENS, (256, LENGTH), generator=torch.Generator().manual_seed(10**6)).to(device)
with torch.no_grad():
    accuracy = (model(sequences).argmax(1) == sequences.flip(1).flatten()).float().mean()
print(f"rank {rank} of {size}: accuracy {accuracy:.3f}, sum of weights {weights:.9f}", flush=True)
dist.destroy_process_group()
