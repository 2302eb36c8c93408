"""Metrics are averaged over all ranks, and over the ranks that have labels."""
import time

import collective_core.torch as hvd
import torch

labelled = hvd.ProcessSet([0, 1])
hvd.init(process_sets=[labelled])
rank = hvd.rank()
torch.manual_seed(rank)
model = torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.ReLU(), torch.nn.Linear(10, 2))
opt = torch.optim.SGD(model.parameters(), lr=0.05)
opt = hvd.DistributedOptimizer(opt, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)


def average(values):
    out = {}
    for key in values:  # in the order in which they were put in
        where = labelled if key == "accuracy" else hvd.global_process_set
        out[key] = hvd.allreduce(torch.tensor(values[key]), name=key, process_set=where).item()  # HANGS HERE
    return out


for epoch in range(4):
    hits = total = 0
    for step in range(6):
        x, y = torch.randn(16, 10), torch.randint(0, 2, (16,))
        opt.zero_grad()
        out = model(x)
        loss = torch.nn.functional.cross_entropy(out, y)
        loss.backward()
        opt.step()
        hits += (out.argmax(1) == y).sum().item()
        total += len(y)
        time.sleep(0.15)
        print(f"rank {rank} epoch {epoch} step {step} loss {loss.item():.3f}", flush=True)
    values = {"loss": loss.item()}
    if rank in (0, 1):
        values["accuracy"] = hits / total
    if rank == 1 and epoch == 2:
        values = dict(sorted(values.items()))  # went through a sorted JSON file
    print("epoch", epoch, average(values), flush=True)
