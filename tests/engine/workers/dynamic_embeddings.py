"""A table of any ids against a dictionary in one process: admission, expiry, a full table, checkpoints on another number of ranks.

Arguments: a folder, and `save` or `load`, which goes on from what `save` has left after half of the steps.
"""

# ruff: noqa: PT017 - worker scripts run without pytest

import sys
import warnings
from pathlib import Path

import collective_core.torch as hvd
import common
import numpy as np
import torch

hvd.init()
torch.set_num_threads(1)
rank, size = hvd.rank(), hvd.size()
folder, action = Path(sys.argv[1]), sys.argv[2]
COLUMNS, STEPS, LR, ADMIT, EXPIRE = 3, 24, 0.25, 3, 4
BATCH = 24


def batch(step):
    """Ids of all ranks together: of a pool that moves, so that some go out of use and some come back."""
    generator = torch.Generator().manual_seed(step)
    pool = torch.arange(12) + 6 * (step // 6 % 3)
    ids = pool[torch.randint(12, (BATCH,), generator=generator)] * (1 << 58) - 7
    return ids, torch.randn(BATCH, COLUMNS, generator=generator, dtype=torch.float64)


class Reference:
    def __init__(self):
        self.counts, self.used, self.rows, self.steps = {}, {}, {}, 0

    def step(self, ids, targets):
        for i in ids:
            self.counts[i] = self.counts.get(i, 0) + 1
            self.used[i] = self.steps
        for i in set(ids):
            if self.counts[i] >= ADMIT:
                self.rows.setdefault(i, np.zeros(COLUMNS))
        gradients = {i: np.zeros(COLUMNS) for i in set(ids) & set(self.rows)}
        for i, target in zip(ids, targets, strict=True):
            if i in gradients:
                gradients[i] += 2 * (self.rows[i] - target) / len(ids)
        for i, gradient in gradients.items():
            self.rows[i] -= LR * gradient
        self.steps += 1
        if self.steps % EXPIRE == 0:
            for i in [i for i, step in self.used.items() if step < self.steps - EXPIRE]:
                for known in (self.counts, self.used, self.rows):
                    known.pop(i, None)


capacity = 60 if action == "save" else 90  # another capacity is no obstacle
table = hvd.nn.DynamicEmbedding(capacity, COLUMNS, hvd.nn.SGD(LR), admit_after=ADMIT, expire_after=EXPIRE, scale=0.0, dtype=torch.float64)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0), named_parameters=table.named_parameters())
checkpoints = hvd.Checkpoints(folder, model=table)
reference, everything = Reference(), sorted({i for step in range(STEPS) for i in batch(step)[0].tolist()})
begin = checkpoints.restore()["step"] if action == "load" else 0
assert begin == (STEPS // 2 if action == "load" else 0)
mine = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
in_use = []
for step in range(STEPS):
    ids, targets = batch(step)
    reference.step(ids.tolist(), targets.numpy())
    if step >= begin:
        table.train()
        optimizer.zero_grad()
        loss = (table(ids[mine]) - targets[mine]).square().sum() / BATCH
        (loss * size).backward()
        optimizer.step()
        table.eval()
        expected = np.array([reference.rows.get(i, np.zeros(COLUMNS)) for i in everything])
        torch.testing.assert_close(table(torch.tensor(everything)), torch.from_numpy(expected), rtol=1e-12, atol=1e-12)
        in_use.append(sum(hvd.allgather_object(table.rows_in_use())))
        assert in_use[-1] == len(reference.rows), (step, in_use, len(reference.rows))
    if action == "save" and step + 1 == STEPS // 2:
        checkpoints.save(step + 1)
        checkpoints.wait()
        state = {name: value.clone() for name, value in table.state_dict().items()}
        seen = table(torch.tensor(everything)).detach()
assert in_use != sorted(in_use), "nothing has expired"
if action == "save":
    table.load_state_dict(state)
    assert torch.equal(table(torch.tensor(everything)), seen)
    for row in (capacity, -2, int(state["known"][:, 3].max())):
        damaged = {name: value.clone() for name, value in state.items()}
        damaged["known"][torch.nonzero(state["known"][:, 3] >= 0)[:2, 0], 3] = row
        try:
            table.load_state_dict(damaged)
            sys.exit(f"a state with row {row} was taken")
        except RuntimeError as error:
            assert "known is damaged: each id has a row of its own" in str(error), error
    assert torch.equal(table(torch.tensor(everything)), seen)

# Initial values depend on id and seed alone; ids beyond the capacity have none, and a warning says so.
alone = hvd.add_process_set([0]) if size > 1 else None
ids = torch.arange(-100, 100)
table = hvd.nn.DynamicEmbedding(1000, 2, hvd.nn.Adam(0.1), scale=0.5, seed=3)
values = table(ids).detach()
assert 0.2 < values.std() < 0.35
assert values.abs().max() <= 0.5
assert len(values.unique()) > 390
if alone is not None and rank == 0:
    assert torch.equal(hvd.nn.DynamicEmbedding(1000, 2, hvd.nn.SGD(0.1), scale=0.5, seed=3, process_set=alone)(ids), values)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    small = hvd.nn.DynamicEmbedding(size * 4, 2, hvd.nn.SGD(0.1), scale=0.5)
    found = small(ids).detach()
assert any("are given away" in str(warning.message) for warning in caught)
assert int(found.any(1).sum()) == size * 4
common.report(done=True)
