"""An elastic job of two ranks: rank 1's GPU work fails before a commit. Nothing broken is committed, and the job goes on.

Argument: a file that the failure leaves, so that there is one.
"""

import sys
from pathlib import Path

import collective_core.torch as hvd
import torch

STEPS = 6
failed = Path(sys.argv[1])
hvd.init()
torch.cuda.set_device(0)
model = torch.nn.Linear(1000, 1, bias=False).cuda()
torch.nn.init.zeros_(model.weight)


@hvd.elastic.run
def train(state):
    while state.step < STEPS:
        summed = hvd.allreduce(torch.ones_like(model.weight), name="gradient")
        with torch.no_grad():
            model.weight += summed
        if hvd.rank() == 1 and state.step == 3 and not failed.exists():
            failed.touch()
            model.weight.flatten()[torch.tensor([10**6], device="cuda")]  # the GPU finds out later that there is no such element
        state.step += 1
        try:
            state.commit()
        except RuntimeError as error:
            print("REPORT not committed:", type(error).__name__, str(error).splitlines()[0], flush=True)
            raise


train(hvd.elastic.TorchState(model, step=0))
assert (model.weight == STEPS).all(), model.weight
print("REPORT done", hvd.rank(), hvd.size(), flush=True)
