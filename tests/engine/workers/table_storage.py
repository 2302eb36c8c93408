"""Tables in files, with caches of few rows or none, are trained like those in memory, to the last bit.

Arguments: a folder, and `all` or `few`, which leaves out most optimizers.
"""

# ruff: noqa: PT017 - worker scripts run without pytest

import io
import re
import sys
from pathlib import Path

import collective_core.torch as hvd
import common
import torch

hvd.init()
torch.set_num_threads(1)
rank, size = hvd.rank(), hvd.size()
folder, saved = Path(sys.argv[1]) / "rows", Path(sys.argv[1]) / "saved"
folder.mkdir(exist_ok=True)
ROWS, COLUMNS, STEPS = 6_000, 5, 6
#: Of a row with its state, at most, and what the cache notes of it.
SLOT_BYTES = 3 * COLUMNS * 4 + 17
OPTIMIZERS = (
    hvd.nn.SGD(0.1),
    hvd.nn.Adagrad(0.1, initial_accumulator_value=0.5),
    hvd.nn.RowWiseAdagrad(0.1, initial_accumulator_value=0.5),
    hvd.nn.Adam(0.1),
    hvd.nn.FTRL(0.1, l1=0.001),
)
#: Rows that a cache holds: none, fewer than a step uses, more than all.
CACHED = (0, 64, 10 * ROWS)


def step_once(table, optimizer, step):
    """Two backward passes, whose ids a hash scatters; some are in both, and on both ranks."""
    optimizer.zero_grad()
    for half in range(2):
        generator = torch.Generator().manual_seed(100 * step + 2 * rank + half)
        ids = (torch.rand(300, generator=generator) * 9).exp().long()
        table(ids).square().sum().backward()
    optimizer.step()


def contents(table):
    return {name: tensor.clone() for name, tensor in table.state_dict().items()}


def must_be_equal(found, expected, what):
    assert found.keys() == expected.keys(), what
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), f"{what}: {name}"


def trained(make, **options):
    """A table, and what it held after half of the steps, from a checkpoint, from a state_dict, and after the other half."""
    table = make(**options)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.1))
    for step in range(STEPS // 2):
        step_once(table, optimizer, step)
    held = [contents(table)]
    checkpoints = hvd.Checkpoints(saved, overwrite=True, table=table)
    checkpoints.save(1)
    checkpoints.wait()
    for step in range(STEPS // 2, STEPS):
        step_once(table, optimizer, step)
    held.append(contents(table))
    checkpoints.restore()
    held.append(contents(table))
    table.load_state_dict(held[0])
    for step in range(STEPS // 2, STEPS):
        step_once(table, optimizer, step)
    must_be_equal(contents(table), held[1], "trained again")
    return table, [*held, contents(table)]


def sharded(optimizer, sharding, **options):
    return hvd.nn.ShardedEmbedding(ROWS, COLUMNS, optimizer, sharding, seed=1, hash_ids=True, **options)


def dynamic(optimizer, **options):
    return hvd.nn.DynamicEmbedding(ROWS, COLUMNS, optimizer, admit_after=2, expire_after=2, seed=1, **options)


kinds = [(lambda optimizer=optimizer, **options: sharded(optimizer, "row_wise", **options)) for optimizer in OPTIMIZERS]
kinds.append(lambda **options: sharded(OPTIMIZERS[2], "column_wise", **options))
kinds.append(lambda **options: sharded(OPTIMIZERS[3], "table_wise", owner=size - 1, **options))
kinds.append(lambda **options: dynamic(OPTIMIZERS[1], **options))
for number, make in enumerate(kinds):
    if sys.argv[2] == "few" and number not in (3, len(kinds) - 1):
        continue
    _, expected = trained(make)
    for rows in CACHED if sys.argv[2] == "all" else CACHED[1:2]:
        stored, held = trained(make, storage=folder, cache_bytes=rows * SLOT_BYTES)
        for when, (found, wanted) in enumerate(zip(held, expected, strict=True)):
            must_be_equal(found, wanted, f"table {number} with {rows} rows cached, {when}")
        # What a program does with the weight itself holds for the next lookup.
        assert torch.equal(stored.weight, held[-1]["weight"])
        with torch.no_grad():
            stored.weight.fill_(2.0)
        if number < len(OPTIMIZERS):
            assert torch.equal(stored(torch.arange(9)), torch.full((9, COLUMNS), 2.0))
    assert not list(folder.iterdir()), "a file is left"


# A large table takes no memory but the cache's.
def own_kb():
    """Memory that is in no file."""
    return int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


before, many = own_kb(), 1_000_000
table = hvd.nn.ShardedEmbedding(many, 32, hvd.nn.Adagrad(0.1), storage=folder, cache_bytes=4 << 20)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.1))
for step in range(10):
    ids = torch.randint(many, (5000,), generator=torch.Generator().manual_seed(10 * step + rank))
    optimizer.zero_grad()
    table(ids).square().sum().backward()
    optimizer.step()
checkpoints = hvd.Checkpoints(saved, overwrite=True, table=table)
checkpoints.save(2)
checkpoints.restore()
grown = own_kb() - before
assert grown < many // size * 32 * 4 * 2 // 1024 / 2, grown

# Parameters are true whenever a program looks at them, and what it writes to them holds, however it came by them.
few = torch.arange(100)
pair = [hvd.nn.ShardedEmbedding(100, COLUMNS, hvd.nn.Adagrad(0.1), seed=1, **o) for o in ({}, {"storage": folder, "cache_bytes": 1 << 20})]
kept = [[table.weight, *table.parameters(), dict(table.named_parameters())["weight"]] for table in pair]
optimizers = [hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.1)) for table in pair]
rows, emptied = pair[1].table.rows, []
rows.clear = lambda: emptied.append(1) or type(rows).clear(rows)
uses = (
    lambda weights: [weight.abs().max() for weight in weights],
    lambda weights: torch._foreach_abs(weights),
    lambda weights: torch.stack(weights),
    lambda weights: [weight.data for weight in weights],
    lambda weights: [weights[-1].mul_(0.5)],
    lambda weights: [weights[0].data.add_(1.0)],
    lambda weights: [weights[1].detach().numpy().fill(2.0), torch.nn.init.constant_(weights[1][3:5], 0.25)][1:],
)
for step, use in enumerate(uses):
    before = len(emptied)
    for table, optimizer in zip(pair, optimizers, strict=True):
        table.zero_grad()
        optimizer.zero_grad()
        table(torch.randint(100, (30,), generator=torch.Generator().manual_seed(10 * step + rank))).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(table.parameters(), 1.0)
        optimizer.step()
        table.state_dict()
        assert [p.shape for p in table.parameters()] == [torch.Size(table.table.rows.weight.shape)]
    assert len(emptied) == before, "what looks at no number has emptied the cache"
    with torch.no_grad():
        found, expected = (list(use(weights)) for weights in reversed(kept))
    assert len(emptied) > before
    assert found, step
    assert all(torch.equal(*each) for each in zip(found, expected, strict=True)), step
    assert torch.equal(pair[0](few), pair[1](few)), step

# Errors.
for whole in (pair[1], pair[1].weight):
    try:
        torch.save(whole, io.BytesIO())
        raise RuntimeError("a table in a file was pickled")
    except TypeError as failure:
        assert "save its state_dict()" in str(failure), failure
for options, error, message in (
    ({"storage": folder if rank == 0 else folder / "none"}, hvd.CollectiveError, "rank 1 has no room for its rows in"),
    ({"storage": folder, "cache_bytes": -1}, hvd.CollectiveError, "rank 0: cache_bytes=-1 is not possible"),
    ({"storage": folder, "cache_bytes": 1 << 20 if rank == 0 else "1"}, hvd.CollectiveError, "rank 1: cache_bytes='1' is not possible"),
):
    try:
        hvd.nn.ShardedEmbedding(ROWS, COLUMNS, hvd.nn.SGD(0.1), **options)
        raise RuntimeError(f"{options} was accepted")
    except error as failure:
        assert message in str(failure), failure
common.report(done=True)
