"""Checkpoints of sharded tables, across numbers of ranks and shardings. Arguments: the folder, what to do, the sharding.

`save` trains four steps, saves after two and after four; `go-on` restores and trains two more; both report the whole tables. `again` saves
a step three times, the second time in vain.
"""
# ruff: noqa: PT017 - worker scripts run without pytest

import os
import sys
import zlib
from pathlib import Path

import collective_core.torch as hvd
import common
import torch
from collective_core.errors import CollectiveError

hvd.init()
torch.set_num_threads(1)
folder, action, sharding = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
rank, size = hvd.rank(), hvd.size()
ROWS, COLUMNS, BATCH = 31, 6, 12


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        options = {"sharding": sharding, "dtype": torch.float64, "owner": size - 1}
        self.users = hvd.nn.ShardedEmbedding(ROWS, COLUMNS, hvd.nn.Adam(0.1), **options)
        self.pages = hvd.nn.ShardedEmbeddingBag(ROWS + 7, COLUMNS, hvd.nn.RowWiseAdagrad(0.1), mode="sum", **options)
        self.dense = torch.nn.Linear(COLUMNS, 1).double()

    def forward(self, ids):
        return self.dense(self.users(ids[:, 0]) + self.pages(ids)).tanh().mean()


def train(model, optimizer, steps):
    for step in steps:
        ids = torch.randint(ROWS, (BATCH, 4), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(ids[rank * BATCH // size : (rank + 1) * BATCH // size]).backward()
        optimizer.step()


def whole(model):
    return [model.users.gather_weight(), model.pages.gather_weight(), model.dense.weight.detach().clone()]


def digest(tensors):
    return zlib.crc32(b"".join(tensor.numpy().tobytes() for tensor in tensors))


torch.manual_seed(0)
model = Model()
optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
checkpoints = hvd.Checkpoints(folder, keep=2, model=model, optimizer=optimizer)
if action == "save":
    for step in (2, 4):
        train(model, optimizer, range(step - 2, step))
        checkpoints.save(step, epoch=step * 10)
        at_save = digest(whole(model))
    # In this job a state_dict brings back this rank's part.
    state = {name: value.clone() for name, value in model.state_dict().items()}
    train(model, optimizer, range(4, 6))
    end = whole(model)
    model.load_state_dict(state)
    assert digest(whole(model)) == at_save
    checkpoints.wait()
    if rank == 0:
        assert sorted(path.name for path in folder.iterdir()) == [
            f"step-{step:012d}.{kind}" for step in (2, 4) for kind in ("checkpoint", "tables")
        ]
    common.report(digest=at_save, end=[tensor.tolist() for tensor in end])
elif action == "go-on":
    assert checkpoints.restore() == {"step": 4, "epoch": 40}
    found = digest(whole(model))
    train(model, optimizer, range(4, 6))
    common.report(digest=found, end=[tensor.tolist() for tensor in whole(model)])
    checkpoints.save(6)
    checkpoints.wait()
    names = sorted(path.name for path in folder.iterdir())
    assert names == [f"step-{step:012d}.{kind}" for step in (4, 6) for kind in ("checkpoint", "tables")], names
elif action == "again":
    digests = []
    for attempt in range(3):
        train(model, optimizer, range(2))
        if attempt == 1:
            checkpoints._begin_writing = lambda *_: os.stat("/nowhere")
        try:
            checkpoints.save(2)
            checkpoints.wait()
            digests.append(digest(whole(model)))
            assert attempt != 1
        except CollectiveError as error:
            assert "No such file or directory" in str(error), error
            checkpoints = hvd.Checkpoints(folder, keep=2, model=model, optimizer=optimizer)
        assert checkpoints.restore() == {"step": 2}
        assert digest(whole(model)) == digests[-1]
    assert digests[0] != digests[1]
    if rank == 0:
        names = [path.name.split(".", 1)[1] for path in folder.iterdir()]
        assert len(names) == 2, names
    common.report(digest=digests[-1])
else:  # damaged: what was saved last lacks a byte in one rank's file; a bit of the one before is wrong
    restored = checkpoints.restore() if action == "short" else None
    if action == "short":
        common.report(step=restored["step"])
    else:
        try:
            checkpoints.restore()
            raise RuntimeError("a damaged table was read")
        except CollectiveError as error:
            common.report(error=str(error))
        other = hvd.Checkpoints(folder, model=torch.nn.Linear(COLUMNS, 1), optimizer=optimizer)
        try:
            other.restore()
            raise RuntimeError("a model without the tables was accepted")
        except CollectiveError as error:
            assert "sharded tables" in str(error), error
