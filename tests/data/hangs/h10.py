import signal
import threading
import time

import torch
import torch.distributed as dist

history = []
guard = threading.Lock()


def snapshot(signum, frame):
    """Prints where we are, every few seconds."""
    with guard:  # HANGS HERE
        print("so far:", len(history), "steps, last", history[-1:], flush=True)
    signal.setitimer(signal.ITIMER_REAL, 0.57)


def record(value, slow):
    with guard:
        history.append(value)
        if slow:
            time.sleep(0.12)  # writes to a network drive


dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 1:
    signal.signal(signal.SIGALRM, snapshot)
    signal.setitimer(signal.ITIMER_REAL, 1.03)

model = torch.nn.parallel.DistributedDataParallel(torch.nn.Conv1d(2, 4, 3))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(200):
    loss = model(torch.randn(4, 2, 16)).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    time.sleep(0.1)
    print(f"rank {rank} step {step} loss {loss.item():.4f}", flush=True)
    record(loss.item(), slow=step > 8)
dist.destroy_process_group()
