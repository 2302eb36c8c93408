"""A download that fails a few times before it works."""
import time

import collective_core  # noqa: F401
import torch
import torch.distributed as dist


class Mirror:
    def __init__(self, failures):
        self.failures = failures

    def fetch(self, part):
        if self.failures:
            self.failures -= 1
            raise ConnectionError("timed out")
        return torch.randn(40, 5)


def download(mirror, part):
    delay = 1.0
    while True:
        try:
            return mirror.fetch(part)
        except ConnectionError as error:
            print(f"part {part}: {error}, again in {delay:.0f} s", flush=True)
            time.sleep(delay)
            delay = min(2 * delay, 16)


dist.init_process_group("cpu:collective")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(5, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.05)
for part in range(3):
    data = download(Mirror(5 if part == 1 and rank == 1 else 0), part)
    for step, x in enumerate(data.split(4)):
        loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.15)
        print(f"rank {rank} part {part} step {step} loss {loss.item():.4f}", flush=True)
dist.destroy_process_group()
