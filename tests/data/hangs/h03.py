"""Trains, and keeps the last good checkpoint under a fixed name."""
import os
import shutil
import subprocess
import tempfile
import time

import torch
import torch.distributed as dist

FOLDER = tempfile.mkdtemp(prefix="ckpt-")


def save(model, step):
    fresh = os.path.join(FOLDER, f"step{step}.pt")
    torch.save(model.state_dict(), fresh)
    copy = subprocess.Popen(["cp", "-i", fresh, os.path.join(FOLDER, "last.pt")], stdin=subprocess.PIPE,
                            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    copy.wait()  # HANGS HERE
    os.remove(fresh)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    net = torch.nn.GRU(8, 16, batch_first=True)
    model = torch.nn.parallel.DistributedDataParallel(net)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(40):
        out, _ = model(torch.randn(4, 10, 8))
        loss = out.pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.2)
        print(f"step {step} loss {loss.item():.4f}", flush=True)
        if rank == 0 and step % 6 == 5:
            save(net, step)
    shutil.rmtree(FOLDER, ignore_errors=True)
    dist.destroy_process_group()


main()
