"""Loads a plug-in with the learning-rate schedule after the warm-up."""
import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist

PLUGIN = """
import threading

def rate(step):
    return 0.1 / (1 + step)

def warm(result):
    import schedule_plugin
    result.append(schedule_plugin.rate(0))

result = []
thread = threading.Thread(target=warm, args=(result,), daemon=True)
thread.start()
{join}
"""

dist.init_process_group("collective")
rank = dist.get_rank()
folder = tempfile.mkdtemp(prefix="plugins-")
with open(os.path.join(folder, "schedule_plugin.py"), "w") as f:
    f.write(PLUGIN.format(join="thread.join()" if rank == 0 else ""))
sys.path.insert(0, folder)

model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(60):
    if step >= 12:
        import schedule_plugin  # HANGS HERE
        opt.param_groups[0]["lr"] = schedule_plugin.rate(step)
    loss = model(torch.randn(5, 3)).pow(2).sum()
    opt.zero_grad()
    loss.backward()
    opt.step()
    time.sleep(0.2)
    print(f"rank {rank} step {step} loss {loss.item():.4f}", flush=True)
dist.destroy_process_group()
