"""On GPUs: rank 1 dies when rank 0's GPU already waits for it in NCCL. argv: ``shared``: both ranks on one GPU, and none dies."""

import os
import signal
import sys
import warnings

import collective_core.torch as hvd
import torch

hvd.init()
shared = sys.argv[1:] == ["shared"]
torch.cuda.set_device(0 if shared else hvd.local_rank())
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    first = hvd.allreduce(torch.ones(1000, device="cuda"), op=hvd.Sum)
assert (first.cpu() == hvd.size()).all()
if shared:
    assert hvd.rank() > 0 or any("use the same GPU" in str(warning.message) for warning in caught)
    print("REPORT shared", flush=True)
    hvd.shutdown()
    sys.exit()
tensor = torch.ones(1 << 24, device="cuda")
if hvd.rank() == 1:
    torch.cuda._sleep(4_000_000_000)  # its part comes seconds after it has been agreed on, and never
    hvd.allreduce_(tensor, name="in flight")
    os.kill(os.getpid(), signal.SIGKILL)
hvd.allreduce_(tensor, name="in flight")
torch.cuda.synchronize()  # ends, because the operation is aborted
try:
    hvd.allreduce_(tensor, name="after")
    print("REPORT nothing was noticed", flush=True)
except hvd.HorovodInternalError as error:
    print("REPORT dead", error.ranks, flush=True)
os._exit(0)
