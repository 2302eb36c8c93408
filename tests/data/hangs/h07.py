"""A training loop that "never crashes"."""
import logging
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")


def batch(rank, step):
    if rank == 2 and step == 14:
        raise ValueError("sample 4711: image is truncated")
    return torch.randn(16, 20), torch.randint(0, 5, (16,))


def train_epoch(model, opt, rank):
    try:
        for step in range(30):
            x, y = batch(rank, step)
            loss = torch.nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            time.sleep(0.15)
            logging.info("rank %d step %d loss %.3f", rank, step, loss.item())
    except Exception as error:
        logging.debug("epoch ended early: %s", error)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(torch.nn.Sequential(torch.nn.Linear(20, 40), torch.nn.ReLU(), torch.nn.Linear(40, 5)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(4):
        train_epoch(model, opt, rank)
        dist.barrier()  # HANGS HERE
        if rank == 0:
            logging.info("epoch %d done", epoch)
    dist.destroy_process_group()


main()
