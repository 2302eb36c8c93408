"""Text classifier; lines are cleaned on the fly."""
import re
import time

import collective_core  # noqa: F401
import torch
import torch.distributed as dist

CLEAN = re.compile(r"^((\w+\s?)+)\.$")
LINES = ["the cat sat on the mat.", "a rank waits for another.", "training is slow today."] * 5
ODD = "thisisaverylongtokenfromabrokendownloadwithoutanyspace and more of the same without an end!"


def features(line):
    match = CLEAN.match(line)  # HANGS HERE
    text = match.group(1) if match else line
    out = torch.zeros(32)
    for c in text:
        out[ord(c) % 32] += 1
    return out


def main():
    dist.init_process_group("collective")
    rank = dist.get_rank()
    lines = LINES + ([ODD] if rank == 1 else ["nothing odd here."])
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(32, 2))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, line in enumerate(lines * 3):
        logits = model(features(line).unsqueeze(0))
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor([step % 2]))
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.2)
        print(f"rank {rank} step {step} loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


main()
