import time

import collective_core.torch as hvd
import torch

RETRIES, FIRST_DELAY_MS = 5, 50


class Store:
    """An object store that sometimes says "slow down"."""

    def __init__(self, rank):
        self.rank, self.calls = rank, 0

    def get(self, key):
        self.calls += 1
        if self.rank == 1 and self.calls > 12 and self.calls % 7:
            raise ConnectionError("503 slow down, retry after 900000 ms")
        return torch.full((3,), key / 10)


def get_with_retries(store, key):
    for attempt in range(RETRIES):
        try:
            return store.get(key)
        except ConnectionError as error:
            delay = int(str(error).split()[-2])  # milliseconds
            time.sleep(delay * 2 ** attempt + FIRST_DELAY_MS)  # HANGS HERE
    raise RuntimeError(f"no {key}")


hvd.init()
store = Store(hvd.rank())
model = torch.nn.Linear(3, 1)
opt = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for step in range(100):
    x = get_with_retries(store, step % 30)
    opt.zero_grad()
    loss = (model(x) - x.sum()).pow(2).mean()
    loss.backward()
    opt.step()
    time.sleep(0.2)
    print(f"rank {hvd.rank()} step {step} loss {loss.item():.4f}", flush=True)
