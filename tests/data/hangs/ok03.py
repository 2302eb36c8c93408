"""Checkpoints to a slow disk on rank 0; the others wait."""
import io
import os
import tempfile
import time

import collective_core  # noqa: F401
import torch
import torch.distributed as dist


def save_slowly(state, path, rate):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    data = buffer.getvalue()
    with open(path, "wb") as f:
        for start in range(0, len(data), rate):
            f.write(data[start:start + rate])
            f.flush()
            os.fsync(f.fileno())
            time.sleep(1)


dist.init_process_group("collective")
rank = dist.get_rank()
net = torch.nn.Linear(64, 64)
model = torch.nn.parallel.DistributedDataParallel(net)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 31):
    loss = model(torch.randn(8, 64)).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    time.sleep(0.15)
    print(f"rank {rank} step {step} loss {loss.item():.4f}", flush=True)
    if step == 15:
        if rank == 0:
            with tempfile.TemporaryDirectory() as folder:
                save_slowly(net.state_dict(), folder + "/model.pt", 520)
        dist.barrier()
dist.destroy_process_group()
