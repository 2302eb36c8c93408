"""Trains for some steps with snapshots in a folder, where another job goes on. Arguments: the folder, and how many."""

import os
import sys

os.environ["COLLECTIVE_SERVERS"] = os.environ.get("COLLECTIVE_SERVERS", "1")

import collective_core.torch as hvd
import common
import torch
from torch import nn

folder, steps = sys.argv[1], int(sys.argv[2])
hvd.init()
torch.set_num_threads(1)
if hvd.ps.is_server():
    hvd.ps.serve(folder, snapshot_every=1000)
else:
    torch.manual_seed(0)
    model = nn.Sequential(hvd.ps.Embedding(7, 3, hvd.nn.Adam(0.1), seed=2), nn.Linear(3, 1))
    optimizer = hvd.ps.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), model)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(torch.arange(7)) + 1).square().mean().backward()
        optimizer.step()
    common.report(values=[*nn.utils.parameters_to_vector(model.parameters()).tolist(), *model[0].gather_weight().flatten().tolist()])
