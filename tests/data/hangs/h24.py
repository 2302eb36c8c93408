"""Simulates environments in a child process and learns from what it returns."""
import multiprocessing as mp
import time

import collective_core.torch as hvd
import torch


def simulate(queue, n, seed):
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(seed)
    for _ in range(n):
        queue.put(torch.randn(1000, generator=g).tolist())


def rollout(context, n, seed):
    queue = context.Queue()
    child = context.Process(target=simulate, args=(queue, n, seed))
    child.start()
    child.join()  # HANGS HERE
    return [queue.get() for _ in range(n)]


def main():
    hvd.init()
    rank = hvd.rank()
    context = mp.get_context("fork")
    model = torch.nn.Linear(1000, 1)
    opt = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-4), named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for step in range(30):
        n = 30 if rank == 2 and step == 9 else 1  # a longer episode
        x = torch.tensor(rollout(context, n, step * 7 + rank))
        opt.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        opt.step()
        time.sleep(0.1)
        print(f"rank {rank} step {step} loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
