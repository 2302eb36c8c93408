"""The options of DistributedOptimizer, SyncBatchNorm and Adasum, against one process that computes everything itself."""
# ruff: noqa: PT017 - worker scripts run without pytest

import copy
import itertools
import os
import warnings

import common

os.environ.setdefault("COLLECTIVE_FUSION_MB", "0.0005")

import collective_core.torch as hvd
import torch
from torch import nn

hvd.init()
rank, size = hvd.rank(), hvd.size()
BATCH = 4
TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}


class Text(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.words = nn.Embedding(20, 6, sparse=sparse)
        self.never = nn.Embedding(5, 3, sparse=sparse)
        self.out = nn.Linear(6, 3)

    def forward(self, x):
        return self.out(self.words(x).mean(1))


def batch(step, r):
    generator = torch.Generator().manual_seed(100 * step + r)
    return torch.randint(0, 20, (BATCH, 5), generator=generator), torch.randint(0, 3, (BATCH,), generator=generator)


def loss(model, step, r):
    x, y = batch(step, r)
    return nn.functional.cross_entropy(model(x), y)


def expect(kind, call, text):
    try:
        call()
    except kind as error:
        assert text in str(error), error
    else:
        raise RuntimeError(f"no {kind.__name__}: {text}")


def same(model, reference, what):
    for (name, got), want in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(got, want, **TOLERANCE, msg=lambda text, n=name: f"{what} {n}: {text}")


def layers(bias=True):
    return nn.Sequential(nn.Linear(4, 8, bias=bias), nn.Tanh(), nn.Linear(8, 2, bias=bias))


def tables():
    return nn.Embedding(6, 4, sparse=True)


def inputs_of(model, step):
    """Every rank's batch."""
    generator = torch.Generator().manual_seed(step)
    if isinstance(model, nn.Embedding):
        return torch.randint(0, 6, (size, BATCH), generator=generator)
    return torch.randn(size, BATCH, 4, generator=generator).to(next(model.parameters()).dtype)


# Every optimizer that torch has, on averaged gradients. Muon takes matrices only, SparseAdam sparse gradients only; LBFGS follows.
BUILD = {
    "Adadelta": {}, "Adafactor": {}, "Adagrad": {}, "Adam": {}, "AdamW": {}, "Adamax": {}, "ASGD": {}, "Muon": {},
    "NAdam": {}, "RAdam": {}, "RMSprop": {}, "Rprop": {}, "SGD": {"lr": 0.1, "momentum": 0.9}, "SparseAdam": {},
}  # fmt: skip
MODELS = {"Muon": lambda: layers(bias=False), "SparseAdam": tables}
own = {name for name, kind in vars(torch.optim).items() if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)}
assert own - {"Optimizer"} <= {*BUILD, "LBFGS"}, own
for name, options in BUILD.items():
    if not hasattr(torch.optim, name):
        continue
    torch.manual_seed(1)
    reference = MODELS.get(name, layers)()
    model = copy.deepcopy(reference)
    plain = getattr(torch.optim, name)(reference.parameters(), **options)
    wrapped = hvd.DistributedOptimizer(getattr(torch.optim, name)(model.parameters(), **options), model.named_parameters())
    for step in range(3):
        inputs = inputs_of(model, step)
        plain.zero_grad()
        wrapped.zero_grad()
        (sum(reference(part).square().sum() for part in inputs) / size).backward()
        model(inputs[rank]).square().sum().backward()
        plain.step()
        wrapped.step()
    same(model, reference, name)
    other = getattr(torch.optim, name)(copy.deepcopy(model).parameters(), **options)
    state = wrapped if rank == 0 else other
    hvd.broadcast_optimizer_state(state, root_rank=0)
    for theirs, mine in zip(
        hvd.broadcast_object(state.state_dict(), 0)["state"].values(), state.state_dict()["state"].values(), strict=True
    ):
        for key, value in theirs.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(mine[key])), (name, key)

# A closure computes the gradients: as often as it is called they are reduced, and so is the loss, by which LBFGS decides how often.
for name, options, op in (
    ("SGD", {"lr": 0.1, "momentum": 0.9}, hvd.Average),
    ("LBFGS", {"lr": 0.5, "max_iter": 4}, hvd.Average),
    ("LBFGS", {"lr": 0.5, "line_search_fn": "strong_wolfe"}, hvd.Average),
    ("LBFGS", {"lr": 0.5, "line_search_fn": "strong_wolfe"}, hvd.Sum),
):
    torch.manual_seed(1)
    reference = layers().double()
    model = copy.deepcopy(reference)
    plain = getattr(torch.optim, name)(reference.parameters(), **options)
    wrapped = hvd.DistributedOptimizer(getattr(torch.optim, name)(model.parameters(), **options), model.named_parameters(), op=op)
    for step in range(3):
        inputs = inputs_of(model, step)

        def whole(inputs=inputs, plain=plain, reference=reference, op=op):
            plain.zero_grad()
            total = sum(reference(part).square().sum() for part in inputs) / (size if op == hvd.Average else 1)
            total.backward()
            return total

        def part(inputs=inputs, wrapped=wrapped, model=model):
            wrapped.zero_grad()
            own = model(inputs[rank]).square().sum()
            own.backward()
            return own

        want, got = plain.step(whole), wrapped.step(part)
        torch.testing.assert_close(got.detach(), want.detach(), rtol=1e-6, atol=1e-9)
    same(model, reference, f"{name} {options} {op} with a closure")
# One that only returns the loss of a pass before the step; a number may be one, and what is none is left alone.
for returned, want in ((float(rank), sum(range(size))), ("nothing", "nothing")):
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    wrapped = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), op=hvd.Sum)
    model(torch.full((1, 2), rank + 1.0)).sum().backward()
    assert wrapped.step(lambda returned=returned: returned) == want
    assert torch.equal(model.weight.detach(), torch.full((1, 2), 1.0 - size * (size + 1) / 2)), "summed once"

# Sparse gradients, as they are and made dense; accumulation; predivision; groups; sums.
cases = itertools.product((False, True), (1, 2), (hvd.Average, hvd.Sum), (None, 2, "lists"))
for as_dense, passes, op, groups in cases:
    torch.manual_seed(2)
    reference = Text(sparse=False)
    model = Text(sparse=True)
    model.load_state_dict(reference.state_dict())
    plain = torch.optim.SGD(reference.parameters(), lr=0.5)
    wrapped = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5),
        named_parameters=model.named_parameters(),
        backward_passes_per_step=passes,
        op=op,
        gradient_predivide_factor=2.0 if op == hvd.Average else 1.0,
        sparse_as_dense=as_dense,
        groups=[[model.out.weight, model.words.weight], [model.out.bias]] if groups == "lists" else groups,
    )
    for step in range(3):
        plain.zero_grad()
        wrapped.zero_grad()
        for part in range(passes):
            whole = sum(loss(reference, step * passes + part, r) for r in range(size))
            (whole / (size if op == hvd.Average else 1)).backward()
            loss(model, step * passes + part, rank).backward()
        plain.step()
        wrapped.step()
        assert model.words.weight.grad.is_sparse
    same(model, reference, f"dense {as_dense} passes {passes} {op} groups {groups}")

# Gradients that come for the first time after the ranks have agreed, on one rank and then on all, and one that was dense before.
torch.manual_seed(2)
reference = Text(sparse=False)
model = Text(sparse=True)
model.load_state_dict(reference.state_dict())
plain = torch.optim.SGD(reference.parameters(), lr=0.5)
wrapped = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model.named_parameters(), op=hvd.Sum)


def late_loss(text, step, r):
    words = torch.arange(r, r + 3) % 5
    late = text.never(words).square().sum() if step > 2 or (step == 2 and r == 0) else 0.0
    changing = nn.functional.embedding(words, text.words.weight, sparse=text is model and step > 0).square().sum()
    return text.out.weight.square().sum() + late + changing


with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for step in range(5):
        plain.zero_grad()
        wrapped.zero_grad()
        sum(late_loss(reference, step, r) for r in range(size)).backward()
        late_loss(model, step, rank).backward()
        plain.step()
        wrapped.step()
        is_sparse = model.never.weight.grad is not None and model.never.weight.grad.is_sparse
        assert is_sparse == (step > (2 if size > 1 else 1)), f"step {step}"
same(model, reference, "sparse later")
said = [str(warning.message) for warning in caught if "was dense in the first step" in str(warning.message)]
assert len(said) == (1 if size > 1 else 0), said
assert all("words.weight" in text for text in said), said

# Dense and sparse steps of Adagrad round differently: all ranks make the same ones, also when a gradient first comes on one of them alone.
for as_dense in (False, True):
    words, other = nn.Embedding(50, 8, sparse=True), nn.Linear(2, 2)
    nn.init.ones_(words.weight)
    wrapped = hvd.DistributedOptimizer(torch.optim.Adagrad([*words.parameters(), *other.parameters()], lr=0.1), sparse_as_dense=as_dense)
    for step in range(6):
        wrapped.zero_grad()
        used = (step == 2 and rank == 0) or step > 3
        loss = other(torch.ones(1, 2)).sum()
        if used:
            loss = loss + (words(torch.arange(50)) * torch.linspace(0.1 + step, 3, 400).view(50, 8)).sum()
        loss.backward()
        wrapped.step()
    values = hvd.allgather(words.weight.detach().reshape(1, -1))
    assert torch.equal(values, values[:1].expand(size, -1)), (as_dense, "the replicas differ")

# An optimizer that takes sparse gradients alone, with rows that only one rank has.
for as_dense in (False, True):
    words = nn.Embedding(6, 2, sparse=True)
    nn.init.ones_(words.weight)
    wrapped = hvd.DistributedOptimizer(torch.optim.SparseAdam(list(words.parameters()), lr=0.1), sparse_as_dense=as_dense)
    if rank == 0:
        words(torch.tensor([1, 4])).sum().backward()
    wrapped.step()
    want = torch.ones(6, 2)
    want[[1, 4]] = 0.9
    torch.testing.assert_close(words.weight.detach(), want, **TOLERANCE)

# A state that comes from another rank is like its own: the order in memory, types other than the parameter's, sparse tensors.
image = nn.Conv2d(2, 2, 2, bias=False).to(memory_format=torch.channels_last)
precise, words = nn.Linear(3, 1, bias=False).double(), nn.Embedding(6, 2, sparse=True)
for model, kind, options, pixels in (
    (image, torch.optim.Adam, {"fused": True}, torch.arange(32.0).view(2, 2, 2, 4)),
    (precise, torch.optim.NAdam, {}, torch.ones(1, 3).double()),
    (words, torch.optim.SGD, {"momentum": 0.9}, torch.tensor([1, 4])),
):
    hvd.broadcast_parameters(model.state_dict(), 0)
    wrapped = hvd.DistributedOptimizer(kind(model.parameters(), lr=0.1, **options))
    for step in range(3):
        wrapped.zero_grad()
        model(pixels).square().sum().backward()
        wrapped.step()
        if step == 0:
            hvd.broadcast_optimizer_state(wrapped, 0)
    mine = {name: (value.dtype, value.layout) for name, value in wrapped.state[model.weight].items()}
    assert hvd.broadcast_object(mine, 0) == mine, mine
    replicas = hvd.allgather(model.weight.detach().reshape(1, -1))
    assert torch.equal(replicas, replicas[:1].expand(size, -1)), f"{kind.__name__}: the replicas differ"

# What Horovod refuses.
model = nn.Linear(2, 2)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
weight, bias = model.parameters()
expect(ValueError, lambda: hvd.DistributedOptimizer(sgd, [("w", weight), ("w", bias)]), "unique")
expect(ValueError, lambda: hvd.DistributedOptimizer(sgd, [("w", weight)]), "not named")
expect(ValueError, lambda: hvd.DistributedOptimizer(sgd, [weight, bias]), "tuples")
expect(ValueError, lambda: hvd.DistributedOptimizer(sgd, gradient_predivide_factor=2.0, op=hvd.Sum), "gradient_predivide_factor")
expect(ValueError, lambda: hvd.DistributedOptimizer(sgd, groups=[[weight], [weight]]), "once")
expect(ValueError, lambda: hvd.DistributedOptimizer(sgd, groups=[weight, bias]), "list of lists")
expect(ValueError, lambda: hvd.DistributedOptimizer(sgd, op=hvd.Max), "Average, Sum or Adasum")
expect(ValueError, lambda: hvd.broadcast_optimizer_state(torch.optim.LBFGS([weight]), 0), "LBFGS")
if size > 1:
    wrapped = hvd.DistributedOptimizer(sgd, model.named_parameters())
    model(torch.ones(1, 2)).sum().backward()
    expect(AssertionError, wrapped.zero_grad, "prohibited")
    expect(AssertionError, lambda: model(torch.ones(1, 2)).sum().backward(), "backward_passes_per_step")
    wrapped.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with wrapped.skip_synchronize():
        wrapped.step()

# Classes that programs make of Horovod's: with its constructor, from its dictionary, with methods of their own, and further subclasses.
Base = hvd.optimizer._DistributedOptimizer


class Counting(Base):
    steps = 0

    def step(self, closure=None):
        self.steps += 1
        return Base.step(self, closure)


class Inherited(Counting, torch.optim.SGD):
    pass


def constructed(kind, model):
    options = [{"params": list(model.parameters()), "lr": 0.5, "momentum": 0.9}]
    return kind(options, model.named_parameters(), hvd.Compression.none, 1, hvd.Sum, 1.0, None, False, hvd.global_process_set)


copied = type("SGD", (torch.optim.SGD,), dict(Base.__dict__))
merged = type("SGD", (torch.optim.SGD,), {**Base.__dict__, **Counting.__dict__})
for kind in (copied, type("Further", (copied,), {}), merged, Inherited, type("Further", (Inherited,), {})):
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    wrapped = constructed(kind, model)
    for _ in range(2):
        wrapped.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        wrapped.step()
    torch.testing.assert_close(model.weight.detach(), torch.full((1, 2), 1 - 0.5 * size * (1 + 1.9)), **TOLERANCE)
    assert getattr(wrapped, "steps", 2) == 2, kind
    wrapped.load_state_dict(wrapped.state_dict())
model = nn.Linear(2, 1)
expect(ValueError, lambda: copied(model.parameters(), None, hvd.Compression.none, 1, hvd.Adasum), "DistributedOptimizer")
wrapped = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
wrapped.__class__ = type("Further", (type(wrapped),), {})  # as libraries do that add a method to an optimizer
model(torch.ones(1, 2)).sum().backward()
wrapped.step()


# Adasum: the tree of pairs, in float64.
def adasum(vectors):
    while len(vectors) > 1:
        pairs = [(a, b) for a, b in zip(vectors[0::2], vectors[1::2], strict=False)]
        rest = vectors[2 * len(pairs) :]
        vectors = [a * (1 - (a @ b) / (2 * (a @ a))) + b * (1 - (a @ b) / (2 * (b @ b))) for a, b in pairs] + rest
    return vectors[0]


for count in (1, 5, 1031, 300_000):
    everyone = [torch.randn(count, generator=torch.Generator().manual_seed(r), dtype=torch.float64) for r in range(size)]
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-4), (torch.float16, 2e-2), (torch.bfloat16, 1e-1)):
        parts = [v.to(dtype).double() for v in everyone]
        got = hvd.allreduce(parts[rank].to(dtype), op=hvd.Adasum)
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), adasum(parts), rtol=tolerance, atol=tolerance)
assert torch.allclose(hvd.allreduce(torch.full((9,), 3.0), op=hvd.Adasum), torch.full((9,), 3.0)), "parallel vectors are averaged"
one_hot = torch.zeros(size)
one_hot[rank] = 1.0
assert torch.allclose(hvd.allreduce(one_hot, op=hvd.Adasum), torch.ones(size)), "orthogonal vectors are added"
assert torch.equal(hvd.allreduce(torch.zeros(3), op=hvd.Adasum), torch.zeros(3))
model = nn.Linear(3, 1, bias=False)
nn.init.ones_(model.weight)
wrapped = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model.named_parameters(), op=hvd.Adasum)
model(torch.full((1, 3), 2.0)).sum().backward()
wrapped.step()
torch.testing.assert_close(model.weight.detach(), torch.zeros(1, 3), atol=1e-6, rtol=0)


# SyncBatchNorm against BatchNorm on everybody's batch, with batches of different sizes.
for shape in ((3,), (3, 4), (3, 4, 5)):
    inputs = [torch.randn(2 + r, *shape, generator=torch.Generator().manual_seed(r)) * (r + 1) + r for r in range(size)]
    plain = {1: nn.BatchNorm1d, 2: nn.BatchNorm1d, 3: nn.BatchNorm2d}[len(shape)](3)
    sync = hvd.SyncBatchNorm(3)
    whole = torch.cat(inputs).requires_grad_()
    mine = inputs[rank].clone().requires_grad_()
    factor = torch.arange(1.0, whole.numel() + 1).view(whole.shape).remainder(5)
    begin = sum(2 + r for r in range(rank))
    want, got = plain(whole), sync(mine)
    torch.testing.assert_close(got, want[begin : begin + 2 + rank], **TOLERANCE)
    (want * factor).sum().backward()
    (got * factor[begin : begin + 2 + rank]).sum().backward()
    torch.testing.assert_close(mine.grad, whole.grad[begin : begin + 2 + rank], rtol=1e-3, atol=1e-4)
    total = hvd.allreduce(sync.weight.grad, op=hvd.Sum)
    torch.testing.assert_close(total, plain.weight.grad, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(hvd.allreduce(sync.bias.grad, op=hvd.Sum), plain.bias.grad, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(sync.running_mean, plain.running_mean, **TOLERANCE)
    torch.testing.assert_close(sync.running_var, plain.running_var, **TOLERANCE)
    assert sync.num_batches_tracked == 1
    sync.eval()
    plain.eval()
    torch.testing.assert_close(sync(mine), plain(mine), **TOLERANCE)

# Sparse tensors with duplicate indices.
mine = torch.sparse_coo_tensor([[rank, 0, rank]], torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), (size + 1, 2))
dense = sum(
    torch.sparse_coo_tensor([[r, 0, r]], torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), (size + 1, 2)).to_dense() for r in range(size)
)
total = hvd.synchronize(hvd.sparse_allreduce_async(mine, "total", hvd.Sum))
assert total.is_coalesced()
torch.testing.assert_close(total.to_dense(), dense)
torch.testing.assert_close(hvd.synchronize(hvd.sparse_allreduce_async(mine, "mean")).to_dense(), dense / size)
common.report(done=True)
hvd.shutdown()
