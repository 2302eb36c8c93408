"""A program that says gloo, or nothing, under what `provision run --tune` sets; its argument: the backend, or `none`."""

import sys

import common
import torch
import torch.distributed as dist

asked = [] if sys.argv[1] == "none" else [sys.argv[1]]
dist.init_process_group(*asked)
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
x = torch.full((2, 4), rank + 1.0)
outputs = []
for _ in range(2):
    out = model(x)
    outputs.append(out.dtype)
    optimizer.zero_grad()
    out.float().sum().backward()
    optimizer.step()
weight = model.module.weight.detach()
with torch.no_grad():
    # The parameters of now, not those that a cache of conversions had before the steps.
    right = torch.nn.functional.linear(x.double(), weight.double(), model.module.bias.double())
    wrong = (model.module(x).double() - right).abs().max() / right.abs().max()
inside = dist.new_group(backend="gloo")
total = torch.ones(3)
dist.all_reduce(total, group=inside)
common.report(
    groups=[type(each).__name__ for each in (dist.group.WORLD, inside)],
    outputs=[str(each) for each in outputs],
    types=[str(weight.dtype), str(model.module.weight.grad.dtype)],
    wrong=float(wrong),
    total=total.tolist(),
    weights=float(weight.sum()),
)
dist.destroy_process_group()
