import queue
import threading
import time

import torch
import torch.distributed as dist


class Prefetcher:
    """Makes batches in a thread."""

    def __init__(self, rank):
        self.rank = rank
        self.queue = queue.Queue(maxsize=4)
        threading.Thread(target=self.work, daemon=True).start()

    def work(self):
        i = 0
        while True:
            rows = 8 if i % 18 < 17 or self.rank == 0 else 0
            x = torch.randn(rows, 10)
            self.queue.put(x / x.abs().amax())  # raises for an empty batch: the thread ends
            i += 1

    def next(self):
        return self.queue.get()  # HANGS HERE


def main():
    dist.init_process_group("cpu:collective")
    rank = dist.get_rank()
    batches = Prefetcher(rank)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(10, 2))
    opt = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    for step in range(100):
        loss = model(batches.next()).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.2)
        print(f"[rank {rank}] step {step}: {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


main()
