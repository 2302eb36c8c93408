"""Sharded tables against one process with the same global batch: every sharding, every optimizer, uneven and empty batches.

Argument: the sharding.
"""
# ruff: noqa: PT017 - worker scripts run without pytest

import sys
import warnings

import collective_core.torch as hvd
import common
import numpy as np
import torch
from collective_core.errors import CollectiveError
from collective_core.extensions.sparse.hashing import bucket, mixed
from torch import nn

warnings.filterwarnings("ignore", "Sparse invariant checks")  # in PyTorch's own optimizers
hvd.init()
torch.set_num_threads(1)
rank, size = hvd.rank(), hvd.size()
SHARDING = sys.argv[1]
ROWS, COLUMNS, STEPS = 23, 5, 5
LR = 0.125  # a power of two: what is multiplied by it is not rounded


def batch(step, of):
    """Ids and targets of a rank: of other lengths, without any on one rank in each second step, and with many duplicates."""
    generator = torch.Generator().manual_seed(100 * step + of)
    length = 0 if step % 2 and of == step % size else 4 + 3 * of
    ids = torch.randint(0, ROWS, (length, 3), generator=generator)
    ids[:, 0] = ids[:, 0] % 3
    return ids, torch.randn(length, COLUMNS, generator=generator, dtype=torch.float64)


def whole(seed=0):
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Model(nn.Module):
    """An embedding, a bag and a dense layer; ``make`` makes one of the first two."""

    def __init__(self, embedding, bag):
        super().__init__()
        self.embedding, self.bag = embedding, bag
        torch.manual_seed(rank)
        self.dense = nn.Linear(COLUMNS, COLUMNS).double()

    def forward(self, ids):
        return self.dense(self.embedding(ids).sum(1) + self.bag(ids)).tanh()


def loss_of(model, ids, target, samples):
    """The part of the global mean that these samples are."""
    return (model(ids) - target).square().sum() / samples


def samples_of(step):
    return sum(len(batch(step, of)[0]) for of in range(size))


class DenseReference(torch.optim.Optimizer):
    """Row-wise Adagrad and FTRL by their formulas, on dense gradients, for rows that were used."""

    def __init__(self, parameters, kind):
        super().__init__(parameters, {})
        self.kind = kind

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            g, w = p.grad.to_dense().numpy(), p.numpy()
            used = np.unique(p.grad.coalesce().indices().numpy())
            state = self.state[p]
            for i in used:
                if self.kind == "RowWiseAdagrad":
                    state[i] = state.get(i, 0.5) + np.mean(g[i] ** 2)
                    w[i] -= LR * g[i] / (np.sqrt(state[i]) + 1e-6)
                    continue
                z, n = state.get(i, (np.zeros(COLUMNS), np.zeros(COLUMNS)))
                z = z + g[i] - (np.sqrt(n + g[i] ** 2) - np.sqrt(n)) / LR * w[i]
                n = n + g[i] ** 2
                state[i] = z, n
                w[i] = np.where(abs(z) <= 0.01, 0, -(z - np.sign(z) * 0.01) / ((2 + np.sqrt(n)) / LR + 0.1))


OPTIMIZERS = {
    "SGD": (lambda: hvd.nn.SGD(), lambda p: torch.optim.SGD(p, lr=LR)),
    "Adagrad": (lambda: hvd.nn.Adagrad(LR, lr_decay=0.1, eps=1e-6), lambda p: torch.optim.Adagrad(p, LR, lr_decay=0.1, eps=1e-6)),
    "Adam": (lambda: hvd.nn.Adam(LR), lambda p: torch.optim.SparseAdam(p, lr=LR)),
    "RowWiseAdagrad": (
        lambda: hvd.nn.RowWiseAdagrad(LR, initial_accumulator_value=0.5, eps=1e-6),
        lambda p: DenseReference(p, "RowWiseAdagrad"),
    ),
    "FTRL": (lambda: hvd.nn.FTRL(LR, beta=2.0, l1=0.01, l2=0.1), lambda p: DenseReference(p, "FTRL")),
}
for name, (ours, theirs) in OPTIMIZERS.items():
    options = {"sharding": SHARDING, "owner": size - 1, "dtype": torch.float64}
    embedding = hvd.nn.ShardedEmbedding(ROWS, COLUMNS, ours(), **options)
    bag = hvd.nn.ShardedEmbeddingBag(ROWS, COLUMNS, ours(), mode="mean", **options)
    embedding.load_weight(whole(1))
    bag.load_weight(whole(2))
    model = Model(embedding, bag)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert torch.equal(embedding.gather_weight(), whole(1))

    plain = Model(nn.Embedding.from_pretrained(whole(1), freeze=False, sparse=True), nn.EmbeddingBag(ROWS, COLUMNS, sparse=True).double())
    plain.bag.load_state_dict({"weight": whole(2)})
    plain.dense.load_state_dict(model.dense.state_dict())
    rows_optimizer = theirs([plain.embedding.weight, plain.bag.weight])
    dense_optimizer = torch.optim.SGD(plain.dense.parameters(), lr=LR, momentum=0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        ids, target = batch(step, rank)
        output = model(ids)
        assert output.shape == (len(ids), COLUMNS)
        # Divided by this rank's share, because gradients are averaged over ranks.
        (loss_of(model, ids, target, samples_of(step)) * size).backward()
        assert embedding.weight.grad is None
        optimizer.step()
        everything = [batch(step, of) for of in range(size)]
        rows_optimizer.zero_grad()
        dense_optimizer.zero_grad()
        loss_of(plain, torch.cat([i for i, _ in everything]), torch.cat([t for _, t in everything]), samples_of(step)).backward()
        rows_optimizer.step()
        dense_optimizer.step()
        for ours_, plain_ in ((embedding.gather_weight(), plain.embedding.weight), (bag.gather_weight(), plain.bag.weight)):
            torch.testing.assert_close(ours_, plain_.detach(), rtol=1e-12, atol=1e-12, msg=f"{name} step {step}")
    torch.testing.assert_close(model.dense.weight, plain.dense.weight, rtol=1e-12, atol=1e-12)
    parts = hvd.allgather_object(embedding.gather_weight().tolist())
    assert all(part == parts[0] for part in parts), "ranks see different rows"
    shapes = hvd.allgather_object(tuple(embedding.weight.shape))
    assert sum(rows * columns for rows, columns in shapes) == ROWS * COLUMNS, "a row lies on two ranks"

# The same bits where sums are not rounded, in float32: gradients are small whole numbers.
for ours, theirs in (
    (hvd.nn.Adagrad(), lambda p: torch.optim.Adagrad(p, lr=LR)),
    (hvd.nn.Adam(), lambda p: torch.optim.SparseAdam(p, lr=LR)),
    (hvd.nn.SGD(), lambda p: torch.optim.SGD(p, lr=LR)),
):
    embedding = hvd.nn.ShardedEmbedding(ROWS, COLUMNS, ours, sharding=SHARDING)
    plain = nn.Embedding(ROWS, COLUMNS, sparse=True)
    plain.load_state_dict({"weight": whole(3).float()})
    embedding.load_weight(whole(3).float())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(embedding.parameters(), lr=LR), op=hvd.Sum)
    plain_optimizer = theirs(plain.parameters())
    for step in range(STEPS):
        for of in range(size):
            plain(batch(step, of)[0]).sum().backward()
        plain.weight.grad = plain.weight.grad.coalesce()
        ids, _ = batch(step, rank)
        for half in ids.chunk(2) if len(ids) else (ids, ids):  # what two passes leave is applied together
            embedding(half).sum().backward()
        optimizer.step()
        plain_optimizer.step()
        optimizer.zero_grad()
        plain_optimizer.zero_grad()
        assert torch.equal(embedding.gather_weight(), plain.weight.detach()), (ours.describe(), step)
optimizer.param_groups[0]["lr"] = LR / 2  # as a scheduler does
before = embedding.gather_weight()
embedding(torch.tensor([4])).sum().backward()
optimizer.step()
assert torch.equal(before[4] - embedding.gather_weight()[4], (before[4] - (before[4] - LR / 2 * size))), "the group's rate was not taken"
# What was left of a pass is gone after zero_grad.
before = embedding.gather_weight()
embedding(torch.tensor([4])).sum().backward()
optimizer.zero_grad()
optimizer.step()
assert torch.equal(before, embedding.gather_weight())

# Bags by offsets, sums with weights, an empty bag.
bag = hvd.nn.ShardedEmbeddingBag(ROWS, COLUMNS, hvd.nn.SGD(LR), mode="sum", sharding=SHARDING, dtype=torch.float64)
bag.load_weight(whole(4))
plain = nn.EmbeddingBag(ROWS, COLUMNS, mode="sum").double()
plain.load_state_dict({"weight": whole(4)})
ids, offsets = torch.tensor([3, 3, 8, rank], dtype=torch.int32), torch.tensor([0, 2, 2], dtype=torch.int32)
weights = torch.tensor([1.0, -2.0, 0.5, 4.0], dtype=torch.float64, requires_grad=True)
torch.testing.assert_close(bag(ids, offsets, weights), plain(ids, offsets, weights.detach()), rtol=1e-15, atol=1e-15)
bag(ids, offsets, weights).sum().backward()
torch.testing.assert_close(weights.grad, whole(4)[ids.long()].sum(1), rtol=1e-14, atol=1e-14)

# Initial values depend on the seed, and not on the ranks: those of a set of one rank are the same.
alone = hvd.add_process_set([0]) if size > 1 else None
options = {"init": lambda rows: nn.init.uniform_(rows, -1, 1), "dtype": torch.float64}
table = hvd.nn.ShardedEmbedding(20_000, 3, hvd.nn.SGD(0.1), sharding=SHARDING, seed=1, **options).gather_weight()
if alone is not None and rank == 0:
    small = hvd.nn.ShardedEmbedding(20_000, 3, hvd.nn.SGD(0.1), sharding=SHARDING, seed=1, process_set=alone, **options)
    assert torch.equal(table, small.gather_weight())
    try:
        hvd.DistributedOptimizer(torch.optim.SGD(small.parameters(), lr=0.1))
        raise RuntimeError("an optimizer of other ranks was accepted")
    except ValueError as error:
        assert "give both the same one" in str(error), error
assert 0.5 < float(table.std()) < 0.7
assert len(table[:, 0].unique()) == 20_000
drawn = hvd.nn.ShardedEmbedding(20_000, 3, hvd.nn.SGD(0.1), sharding=SHARDING, **options).gather_weight()
assert 0.5 < float(drawn.std()) < 0.7
assert not torch.equal(drawn, table)

# Any ids, hashed into buckets: the same ones on every rank, and no matter on which rank.
hashed = hvd.nn.ShardedEmbedding(ROWS, COLUMNS, hvd.nn.SGD(LR), sharding=SHARDING, hash_ids=True, dtype=torch.float64)
hashed.load_weight(whole(5))
ids = torch.tensor([-1, 0, 1 << 62, -(1 << 63), (1 << 63) - 1])
assert torch.equal(hashed(ids), whole(5)[bucket(ids, ROWS)])
assert torch.equal(torch.from_numpy(bucket(ids.numpy(), ROWS)), bucket(ids, ROWS))
assert mixed(torch.tensor([0]))[0] == 0xE220A8397B1DCDAF - (1 << 64)  # the first number of splitmix64 with seed 0
counts = torch.bincount(bucket(torch.arange(23_000), ROWS), minlength=ROWS)
assert counts.min() > 800
assert counts.max() < 1200
assert torch.equal(hashed.gather_weight(), whole(5))

# Errors, the same on every rank, after which the tables work.
wrong = torch.tensor([2, ROWS if rank == size - 1 else 3])
for call, message in (
    (lambda: embedding(wrong), f"id {ROWS} is out of range"),
    (lambda: embedding(-wrong if rank == 0 else wrong % ROWS), "is out of range"),
    (lambda: embedding(wrong.float()), "ids must be of int64 or int32"),
    (lambda: hvd.nn.ShardedEmbedding(ROWS + (rank == size - 1) * (size > 1), COLUMNS, hvd.nn.SGD(0.1)), "different sharded tables"),
):
    try:
        call()
        assert size == 1
        assert message == "different sharded tables"
    except CollectiveError as error:
        assert message in str(error), error
with torch.no_grad():
    assert embedding(torch.tensor([[1, 2]])).shape == (1, 2, COLUMNS)
for call, kind in (
    (lambda: hvd.nn.ShardedEmbedding(ROWS, COLUMNS, torch.optim.SGD(plain.parameters(), lr=0.1)), TypeError),
    (lambda: hvd.nn.ShardedEmbedding(ROWS, COLUMNS, hvd.nn.SGD(-1.0)), ValueError),
    (lambda: hvd.nn.ShardedEmbedding(ROWS, COLUMNS, hvd.nn.SGD(0.1), sharding="diagonal"), ValueError),
    (lambda: hvd.nn.ShardedEmbeddingBag(ROWS, COLUMNS, hvd.nn.SGD(0.1), mode="max"), ValueError),
    (lambda: hvd.DistributedOptimizer(torch.optim.SGD(embedding.parameters(), lr=0.1), op=hvd.Adasum), ValueError),
    (lambda: optimizer.step(lambda: None), CollectiveError),
):
    try:
        call()
    except kind:
        pass
    else:
        raise RuntimeError(f"no {kind.__name__}")
common.report(done=True)
