import time

import torch
import torch.distributed as dist


def evaluate(net, batches):
    right = 0
    with torch.no_grad():
        for _ in range(batches):
            right += (net(torch.randn(32, 10)).argmax(1) == 1).sum().item()
            time.sleep(0.25)
    return right / (32 * batches)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    net = torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    model = torch.nn.parallel.DistributedDataParallel(net)
    opt = torch.optim.Adam(model.parameters())
    for epoch in range(2):
        for step in range(10):
            loss = torch.nn.functional.cross_entropy(model(torch.randn(16, 10)), torch.randint(0, 3, (16,)))
            opt.zero_grad()
            loss.backward()
            opt.step()
            time.sleep(0.15)
            print(f"rank {rank} epoch {epoch} step {step} loss {loss.item():.3f}", flush=True)
        if rank == 0:
            print("accuracy", evaluate(net, 120), flush=True)  # 30 s, without the wrapper
        dist.barrier()
    dist.destroy_process_group()


main()
