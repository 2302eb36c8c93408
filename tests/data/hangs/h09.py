"""Two stages: the first sends activations, the second sends gradients back."""
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
other = 1 - rank
layer = torch.nn.Linear(8, 8)
opt = torch.optim.SGD(layer.parameters(), lr=0.05)


def first(step):
    out = layer(torch.randn(4, 8))
    grad = torch.empty_like(out)
    if step % 16 != 15:  # "flush" steps only take the late gradient
        dist.send(out.detach(), other)
    dist.recv(grad, other)  # HANGS HERE
    out.backward(grad)
    return out.sum().item()


def second(step):
    x = torch.empty(4, 8)
    dist.recv(x, other)
    x.requires_grad_()
    loss = layer(x).pow(2).mean()
    loss.backward()
    dist.send(x.grad, other)
    return loss.item()


for step in range(64):
    opt.zero_grad()
    value = first(step) if rank == 0 else second(step)
    opt.step()
    time.sleep(0.2)
    print(f"stage {rank} step {step} value {value:.4f}", flush=True)
dist.destroy_process_group()
