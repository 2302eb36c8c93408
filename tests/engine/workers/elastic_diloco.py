"""DiLoCo in an elastic job: the last rank kills itself once between two synchronisations. Arguments: a folder, and the step at which.

Every rank notes each step that it makes, and at its end what it has.
"""

import json
import os
import signal
import sys
from pathlib import Path

import collective_core.torch as hvd
import torch

folder, dying = Path(sys.argv[1]), int(sys.argv[2])
RANKS, STEPS, SYNC_EVERY = 3, 30, 6
hvd.init()
torch.set_num_threads(1)
torch.manual_seed(os.getpid())  # until the ranks meet
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
inner = torch.optim.Adam(model.parameters(), lr=0.01)
diloco = hvd.DiLoCo(model, inner, sync_every=SYNC_EVERY, bits=8)
log = (folder / f"log.{os.getpid()}").open("a", buffering=1)


@hvd.elastic.run
def train(state):
    outer = [value for fragment in diloco._fragments for tensor in fragment.outer for value in tensor.flatten().tolist()]
    own = [value for p in model.parameters() for value in p.flatten().tolist()]
    log.write(json.dumps({"begin": state.step, "outer": outer, "own": own, "rank": hvd.rank(), "size": hvd.size()}) + "\n")
    goal = state.step + STEPS if hvd.size() == RANKS else float("inf")  # until the one that is lost has been replaced
    while state.step < goal:
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(state.step * 10 + hvd.rank()))
        diloco.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        state.step += 1
        if state.step == dying and hvd.rank() == hvd.size() - 1 and not (folder / "died").exists():
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        log.write(json.dumps({"step": state.step}) + "\n")
        diloco.step(state=state)


state = hvd.elastic.TorchState(diloco=diloco, step=0)
train(state)
diloco.synchronize()
log.write(json.dumps({"end": [value for p in model.parameters() for value in p.flatten().tolist()]}) + "\n")
