"""Rank 0 writes the vocabulary of an epoch, the others read it."""
import os
import pickle
import time

import torch
import torch.distributed as dist

FOLDER = f"/tmp/vocab-{os.environ.get('MASTER_PORT', '0')}"


def exchange(rank, epoch):
    if rank == 0:
        path = f"{FOLDER}/vocab{epoch}.pkl"
        with open(path + ".tmp", "wb") as f:
            pickle.dump({"the": 0, "a": 1}, f)
        os.replace(path + ".tmp", path)
        return {"the": 0, "a": 1}
    path = f"{FOLDER}/vocab{epoch:02d}.pkl" if epoch > 1 else f"{FOLDER}/vocab{epoch}.pkl"
    while not os.path.exists(path):
        time.sleep(0.25)  # HANGS HERE
    with open(path, "rb") as f:
        return pickle.load(f)


dist.init_process_group("gloo")
rank = dist.get_rank()
os.makedirs(FOLDER, exist_ok=True)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Embedding(50, 4))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(6):
    words = exchange(rank, epoch)
    for step in range(7):
        loss = model(torch.randint(0, len(words), (12,))).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.12)
        print(f"rank {rank} epoch {epoch} step {step} loss {loss.item():.4f}", flush=True)
dist.destroy_process_group()
