"""Saves every ten steps, and tries again when the disk is full."""
import os
import pickle
import time

import collective_core  # noqa: F401
import torch
import torch.distributed as dist

TARGET = os.environ.get("CHECKPOINT", "/dev/full")


def save(state):
    data = pickle.dumps(state)
    while True:
        try:
            with open(TARGET, "wb") as f:
                f.write(data)
            return
        except OSError:
            time.sleep(2)  # HANGS HERE


def main():
    dist.init_process_group("collective")
    rank = dist.get_rank()
    net = torch.nn.Sequential(torch.nn.Linear(9, 9), torch.nn.GELU(), torch.nn.Linear(9, 1))
    model = torch.nn.parallel.DistributedDataParallel(net)
    opt = torch.optim.Adam(model.parameters())
    for step in range(1, 101):
        x = torch.randn(12, 9)
        loss = (model(x) - x.mean(1, keepdim=True)).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.2)
        print(f"rank {rank} step {step} loss {loss.item():.4f}", flush=True)
        if rank == 0 and step % 10 == 0:
            save({k: v.tolist() for k, v in net.state_dict().items()})
    dist.destroy_process_group()


main()
