"""On GPUs: rank 1 dies when rank 0's GPU already waits for it in NCCL."""

import os
import signal

import busy
import collective_core.torch as hvd
import torch

hvd.init()
busy.choose_gpu()
assert (hvd.allreduce(torch.ones(1000, device="cuda"), op=hvd.Sum).cpu() == hvd.size()).all()
assert hvd.nccl_enabled()
state = hvd.elastic.TorchState(step=1)
state.commit()
tensor = torch.ones(1 << 24, device="cuda")
if hvd.rank() == 1:
    torch.cuda._sleep(4_000_000_000)  # its part comes seconds after it has been agreed on, and never
    hvd.allreduce_(tensor, name="in flight")
    os.kill(os.getpid(), signal.SIGKILL)
hvd.allreduce_(tensor, name="in flight")
torch.cuda.synchronize()  # ends, because the operation is aborted
for attempt in (state.commit, lambda: hvd.allreduce_(tensor, name="after")):
    try:
        attempt()
        print("REPORT nothing was noticed", flush=True)
    except hvd.HorovodInternalError as error:
        found = error.ranks
print("REPORT dead", found, flush=True)
os._exit(0)
