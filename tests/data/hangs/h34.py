"""FSDP2; a child process writes the log book, so that training need not wait for the disk."""
import os
import threading
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

book, book_lock = [], threading.Lock()


def sampler():
    while True:
        with book_lock:
            book.append(os.times().user)
            time.sleep(0.3)
        time.sleep(0.05)


def flush_book():
    child = os.fork()
    if child == 0:
        with book_lock, open(os.devnull, "w") as f:
            f.write(repr(book))
        os._exit(0)
    os.waitpid(child, 0)  # HANGS HERE


dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.Tanh(), torch.nn.Linear(10, 2))
fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
opt = torch.optim.SGD(model.parameters(), lr=0.05)
if rank == 0:
    threading.Thread(target=sampler, daemon=True).start()
for step in range(200):
    loss = model(torch.randn(4, 10)).pow(2).mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    time.sleep(0.2)
    print(f"rank {rank} step {step} loss {loss.item():.4f}", flush=True)
    if rank == 0 and step >= 10:
        flush_book()
dist.destroy_process_group()
