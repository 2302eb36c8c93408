"""Sharded tables in the hands of a program: moved, converted, with gradients dropped, with a rank that fails or has joined."""

import sys
from functools import partial

import collective_core.torch as hvd
import common
import torch
from torch import nn

hvd.init()
torch.set_num_threads(1)
own_zero_grad = nn.Module.zero_grad
nn.Module.zero_grad = lambda self, set_to_none=True: own_zero_grad(self, set_to_none)  # as a library may have done before hvd.nn is used
rank, size = hvd.rank(), hvd.size()
ROWS, COLUMNS = 8, 4
SHARDINGS = ("row_wise", "table_wise", "column_wise")


def table(sharding="row_wise", **options):
    return hvd.nn.ShardedEmbedding(ROWS, COLUMNS, hvd.nn.SGD(1.0), sharding=sharding, init=nn.init.zeros_, seed=1, **options)


def optimizer_of(module):
    return hvd.DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=1.0), named_parameters=module.named_parameters())


def error_of(call):
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return str(error)
    raise RuntimeError("no error")


# A model that is moved takes its other modules along; rows are trained and saved where they were.
everywhere = torch.arange(ROWS)
for move in (lambda m: m.to("meta"), lambda m: m.float(), lambda m: m.to_empty(device="meta")):
    model = nn.ModuleDict({"table": table(), "dense": nn.Linear(COLUMNS, 1)})
    weight = model["table"].weight
    assert move(model) is model
    assert model["table"].weight is weight
    assert weight.device.type == "cpu"
    assert [name for name, _ in model.named_parameters()] == ["table.weight", "dense.weight", "dense.bias"]
    optimizer = optimizer_of(model["table"])
    output = model["table"](everywhere)
    assert output.device == everywhere.device
    output.sum().backward()
    optimizer.step()
    assert torch.equal(model["table"].gather_weight(), torch.full((ROWS, COLUMNS), -1.0))
    assert torch.equal(model.state_dict()["table.weight"], weight)
    assert torch.equal(weight, torch.full_like(weight, -1.0))
assert {p.device.type for p in model["dense"].parameters()} == {"meta"}
for convert in (lambda m: m.half(), lambda m: m.double(), lambda m: m.to(torch.bfloat16)):
    assert "choose the dtype when the table is made" in error_of(lambda convert=convert: convert(nn.Sequential(table())))
assert table(dtype=torch.float64).double().weight.dtype == torch.float64

# Gradients that a program drops, as of other parameters.
for set_to_none in (True, False):
    model = nn.Sequential(table())
    optimizer = optimizer_of(model)
    for drop in (optimizer.zero_grad, partial(model.zero_grad, set_to_none), lambda: None):
        model(everywhere).sum().backward()
        drop()
    optimizer.step()
    assert torch.equal(model[0].gather_weight(), torch.full((ROWS, COLUMNS), -1.0))

# A rank that has joined is an error on the others, whether or not they need rows of it; then all can go on.
for sharding in SHARDINGS:
    embedding = table(sharding)
    optimizer = optimizer_of(embedding)
    embedding(everywhere).sum().backward()
    if rank == 0:
        for call in (partial(embedding, torch.tensor([0])), partial(embedding, everywhere[:0]), optimizer.step):
            text = error_of(call)
            assert "rank 1 has called join()" in text, (sharding, text)
            assert "give one without data an empty batch" in text, text
    hvd.join()
    optimizer.zero_grad()
    embedding(everywhere).sum().backward()
    optimizer.step()
    assert torch.equal(embedding.gather_weight(), torch.full((ROWS, COLUMNS), -1.0)), sharding

# What fails while one rank reads its rows is an error on all, after which the tables work.
for sharding in SHARDINGS:
    embedding = table(sharding)
    if rank == 0:
        serve, embedding.table._serve = embedding.table._serve, lambda asked: asked.new_empty(0)[asked + 1]
    text = error_of(partial(embedding, everywhere))
    assert "rank 0 cannot read its rows: IndexError" in text, text
    if rank == 0:
        embedding.table._serve = serve
    assert torch.equal(embedding(everywhere), torch.zeros(ROWS, COLUMNS))
assert f"each of the {size} ranks needs a row" in error_of(partial(hvd.nn.DynamicEmbedding, size - 1, COLUMNS, hvd.nn.SGD(1.0)))

# Making a table leaves the generators of the program alone, on GPUs too, and only ranks that hold rows draw any.
torch.cuda.manual_seed_all = lambda seed: sys.exit(f"the GPUs were seeded with {seed}")
drawn = []
before = torch.get_rng_state()
hvd.nn.ShardedEmbedding(ROWS, COLUMNS, hvd.nn.SGD(1.0), sharding="table_wise", owner=size - 1, init=drawn.append, seed=1)
assert torch.equal(torch.get_rng_state(), before)
assert len(drawn) == (rank == size - 1)

# A row for padding: zeros, which no step changes, and which no mean counts.
bags = torch.tensor([[3, 3, 5], [1, 3, 1], [3, 3, 3]])
for sharding in SHARDINGS:
    for ours, theirs in (
        (hvd.nn.ShardedEmbedding, nn.Embedding(ROWS, COLUMNS, padding_idx=3)),
        (hvd.nn.ShardedEmbeddingBag, nn.EmbeddingBag(ROWS, COLUMNS, padding_idx=3, mode="mean")),
    ):
        padded = ours(ROWS, COLUMNS, hvd.nn.SGD(1.0), sharding=sharding, padding_idx=3, seed=1)
        start = padded.gather_weight()
        assert not start[3].any()
        assert start[2].all()
        theirs.load_state_dict({"weight": start})
        optimizers = optimizer_of(padded), torch.optim.SGD(theirs.parameters(), lr=1.0)
        for module, optimizer in zip((padded, theirs), optimizers, strict=True):
            module(bags).square().sum().backward()
            optimizer.step()
        torch.testing.assert_close(padded.gather_weight(), theirs.weight.detach())
        assert not torch.equal(padded.gather_weight(), start)
        torch.testing.assert_close(padded(bags), theirs(bags))
for options in ({"padding_idx": ROWS}, {"padding_idx": -1}, {"padding_idx": 0, "hash_ids": True}):
    assert "it is a row, 0 to 7" in error_of(partial(table, **options))

# Ranks that train apart for some steps cannot share a table meanwhile.
for kind in (hvd.DiLoCo, hvd.LocalSGD):
    model = nn.Sequential(table(), nn.Linear(COLUMNS, 1))
    text = error_of(partial(kind, model, torch.optim.SGD(model.parameters(), lr=1.0), sync_every=4))
    assert "sharded tables take every step together" in text, text

common.report(done=True)
