"""DDP over the engine, with a thread that smooths the metrics."""
import threading
import time

import collective_core  # noqa: F401
import torch
import torch.distributed as dist

metrics, weights = {}, {}
metrics_lock, weights_lock = threading.Lock(), threading.Lock()


def smoother():
    while True:
        with weights_lock:
            time.sleep(0.2)
            scale = weights.get("scale", 1.0)
            with metrics_lock:
                metrics["smooth"] = metrics.get("loss", 0.0) * scale
        time.sleep(0.1)


def publish(step, loss):
    with metrics_lock:
        metrics["loss"] = loss
        if step > 8:
            time.sleep(0.06)
        with weights_lock:  # HANGS HERE
            weights["scale"] = 1 / (1 + step)


dist.init_process_group("collective")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(5, 5))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(300):
    if rank == 0 and step == 6:
        threading.Thread(target=smoother, daemon=True).start()
    loss = (model(torch.randn(8, 5)) - 1).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    time.sleep(0.15)
    print(f"rank {rank} step {step} loss {loss.item():.4f}", flush=True)
    if rank == 0:
        publish(step, loss.item())
dist.destroy_process_group()
