"""An elastic job whose first server kills itself once, right after an update. Arguments: a folder, after which update, and
`snapshots` or `copies`.

An update adds 1 to all elements of an array, of which each server has a part: what it is worth says how many a server knows.
"""

import json
import os
import signal
import sys
from pathlib import Path

import collective_core.torch as hvd
import torch

folder, dying, how = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
RANKS, STEPS, SNAPSHOT_EVERY = 4, 40, 5
hvd.init()
torch.set_num_threads(1)
log = (folder / f"log.{os.getpid()}").open("a", buffering=1)


def note(**what):
    log.write(json.dumps({"rank": hvd.rank(), "size": hvd.size(), **what}) + "\n")


def kill_first_server():
    from collective_core.extensions.ps.store import Store

    update = Store.update

    def update_or_die(self, name, contributions):
        update(self, name, contributions)
        if self.index == 0 and self.updates == dying and not (folder / "died").exists():
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    if update.__name__ == "update":
        Store.update = update_or_die


@hvd.elastic.run
def train(state):
    kill_first_server()  # not before: hvd.ps is first used here, within the elastic function
    if hvd.ps.is_server():
        note(serves=True)
        try:
            hvd.ps.serve(
                **({"snapshots": folder / "snapshots", "snapshot_every": SNAPSHOT_EVERY} if how == "snapshots" else {"replicate": True})
            )
        except Exception as error:
            note(left=type(error).__name__)
            raise
        return
    model = torch.nn.Sequential(torch.nn.Linear(100, 50, bias=False), hvd.ps.EmbeddingBag(10, 2, hvd.nn.SGD(1.0), mode="sum", scale=0.0))
    torch.nn.init.zeros_(model[0].weight)
    optimizer = hvd.ps.DistributedOptimizer(torch.optim.SGD(model[0].parameters(), lr=1.0), model)
    ids = torch.tensor([[0, 1]])

    def known():
        values = [*model[0].weight.flatten()[[0, -1]].tolist(), *model[1].gather_weight()[:2, 0].tolist()]
        assert values[:2] == values[2:], values
        return values[:2]

    note(begin=state.step, known=known())
    goal = state.step + STEPS if hvd.size() == RANKS else float("inf")  # until the one that is lost has been replaced
    while state.step < goal:
        optimizer.zero_grad()
        (-model[0].weight.sum() - model[1](ids).sum()).backward()
        optimizer.step()
        state.step += 1
        note(step=state.step, known=model[0].weight.flatten()[[0, -1]].tolist())
        state.commit()
    note(end=known())


train(hvd.elastic.ObjectState(step=0))
