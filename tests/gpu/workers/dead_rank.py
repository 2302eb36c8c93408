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
    torch.cuda._sleep(4_000_000_000)  # its part comes seconds after it has been agreed on, or never
    hvd.allreduce_(tensor, op=hvd.Sum, name="in flight")
    os.kill(os.getpid(), signal.SIGKILL)
hvd.allreduce_(tensor, op=hvd.Sum, name="in flight")
torch.cuda.synchronize()  # ends, because the operation is aborted, or because the dead rank's GPU has still done its part
try:
    state.commit()
    assert (tensor == hvd.size()).all(), "a broken sum was committed"
except hvd.HorovodInternalError:
    pass
try:
    hvd.allreduce_(tensor, name="after")
except hvd.HorovodInternalError as error:
    print("REPORT dead", error.ranks, flush=True)
os._exit(0)
