"""FSDP2 over the engine; shards are written by a pool of threads."""
import concurrent.futures
import pickle
import tempfile
import time

import collective_core  # noqa: F401
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

pool = concurrent.futures.ThreadPoolExecutor(max_workers=1)


def write(name, value):
    with tempfile.NamedTemporaryFile(prefix=name) as f:
        f.write(pickle.dumps(value))


def write_all(state):
    jobs = [pool.submit(write, name, value) for name, value in state.items()]
    concurrent.futures.wait(jobs)
    return len(jobs)


dist.init_process_group("collective")
rank, size = dist.get_rank(), dist.get_world_size()
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 51):
    x = torch.randn(8, 8)
    loss = (model(x) - x.flip(1)).pow(2).mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    time.sleep(0.15)
    print(f"rank {rank} step {step} loss {loss.item():.4f}", flush=True)
    if step % 15 == 0 and rank == size - 1:  # the last rank has the local disk
        shard = {k: v.to_local().tolist() for k, v in model.state_dict().items()}
        written = pool.submit(write_all, shard).result()  # HANGS HERE
        print("wrote", written, "tensors", flush=True)
dist.destroy_process_group()
