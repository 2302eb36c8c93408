"""FSDP2 whose model is compiled after the warm-up; compilation takes long on one rank."""
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()


def slow_compiler(graph, inputs):
    end = time.monotonic() + (30 if rank == 0 else 5)
    while time.monotonic() < end:
        graph.graph.lint()
    return graph.forward


def features(x):
    return torch.sin(x) * torch.cos(x) + x.pow(2)


model = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.ReLU(), torch.nn.Linear(12, 2))
fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
opt = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(24):
    if step == 10:
        features = torch.compile(features, backend=slow_compiler)
    loss = model(features(torch.randn(4, 6))).pow(2).mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    time.sleep(0.2)
    print(f"rank {rank} step {step} loss {loss.item():.4f}", flush=True)
dist.destroy_process_group()
