"""A table in a file is trained like one in memory, and takes none that the system cannot take back. Argument: a folder."""

# ruff: noqa: PT017 - worker scripts run without pytest

import re
import sys
from pathlib import Path

import collective_core.torch as hvd
import common
import torch

hvd.init()
torch.set_num_threads(1)
folder = Path(sys.argv[1])
ROWS, COLUMNS = 500_000, 32
TABLE_KB = ROWS * COLUMNS * 4 // 1024 // hvd.size()


def own_kb():
    """Memory that is in no file."""
    return int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def trained(storage):
    table = hvd.nn.ShardedEmbedding(ROWS, COLUMNS, hvd.nn.Adagrad(0.1, initial_accumulator_value=0.5), seed=1, storage=storage)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.1))
    for step in range(3):
        ids = torch.randint(ROWS, (100,), generator=torch.Generator().manual_seed(10 * step + hvd.rank()))
        optimizer.zero_grad()
        table(ids).square().sum().backward()
        optimizer.step()
    return table


in_memory = trained(None)
before = own_kb()  # with all that is imported at the first step
stored = trained(folder)
grown = own_kb() - before
assert grown < TABLE_KB / 2, (grown, TABLE_KB)
mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if f"{folder}/.rows-" in line]
assert len(mapped) == 2, mapped  # rows and sums
assert not list(folder.iterdir()), "a file is left"
assert torch.equal(stored.weight, in_memory.weight)
assert torch.equal(stored.table.state["sum"], in_memory.table.state["sum"])
try:
    hvd.nn.ShardedEmbedding(ROWS, COLUMNS, hvd.nn.SGD(0.1), storage=folder if hvd.rank() == 0 else folder / "none")
    raise RuntimeError("a folder that is not there was accepted")
except hvd.CollectiveError as error:
    assert "rank 1 has no room for its rows in" in str(error), error
common.report(done=True)
