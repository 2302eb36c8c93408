import multiprocessing
import os
import signal
import time

import torch
import torch.distributed as dist


def augment(i):
    if i == 61:
        os.kill(os.getpid(), signal.SIGKILL)  # what the kernel does to it when memory is short
    return [(i * k) % 7 / 7 for k in range(8)]


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pool = multiprocessing.get_context("spawn").Pool(2) if rank == 0 else None
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(30):
        indices = range(step * 4, step * 4 + 4)
        if pool:
            rows = pool.map(augment, indices)  # HANGS HERE
        else:
            rows = [[0.1] * 8 for _ in indices]
        loss = model(torch.tensor(rows)).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.15)
        print(f"rank {rank} step {step} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
