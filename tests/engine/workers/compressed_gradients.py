"""Compression with error feedback: what is applied and what is left over is together the mean of all gradients; state, options, bytes."""
# ruff: noqa: PT017 - worker scripts run without pytest

import hashlib
import os

os.environ.setdefault("COLLECTIVE_FUSION_MB", "0.02")  # several buckets

import collective_core.torch as hvd
import common
import torch
from torch import nn

hvd.init()
rank, size = hvd.rank(), hvd.size()
STEPS = 12
CHOICES = {
    "int8": hvd.Compression.int8,
    "topk": hvd.Compression.topk(ratio=0.05),
    "powersgd": hvd.Compression.powersgd(rank=2),
}
SHAPES = [(48, 64), (64,), (7, 5, 3, 3), (64, 96), (), (3, 2), (48, 64), (20, 20)]  # the last is used in every second step


class Weights(nn.Module):
    """Whose gradients the test chooses."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(shape, dtype=dtype) for shape in SHAPES)
        self.unused = nn.Parameter(torch.ones(3, 3, dtype=dtype))

    def forward(self, gradients):
        return sum((weight * gradient).sum() for weight, gradient in zip(self.weights, gradients, strict=False))


def gradients_of(step, of_rank, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1000 * step + of_rank)
    used = SHAPES[:-1] if step % 2 else SHAPES
    return [torch.randn(shape, generator=generator).to(dtype) for shape in used]


def make(compression, dtype=torch.float32, **options):
    model = Weights(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return model, hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression, **options)


def train(model, optimizer, steps, dtype=torch.float32):
    for step in steps:
        optimizer.zero_grad()
        model(gradients_of(step, rank, dtype)).backward()
        optimizer.step()


def sent():
    return sum(row["bytes"] for row in hvd.metrics()["operations"])


def digest(model):
    return hashlib.sha256(b"".join(p.detach().float().numpy().tobytes() for p in model.parameters())).hexdigest()


def bytes_of(call):
    before = sent()
    call()
    return sent() - before


plain, ordinary = make(hvd.Compression.none)
train(plain, ordinary, range(1))  # the ranks agree on a plan
ordinary_bytes = bytes_of(lambda: train(plain, ordinary, range(1, 3)))
means = [[sum(parts) / size for parts in zip(*(gradients_of(step, r) for r in range(size)), strict=False)] for step in range(STEPS)]
totals = [sum(mean[number] for mean in means if number < len(mean)) for number in range(len(SHAPES))]
shares = {}
for name, compression in CHOICES.items():
    for op, factor in ((hvd.Average, 1), (hvd.Sum, size)):
        model, optimizer = make(compression, op=op)
        train(model, optimizer, range(1))
        shares[name] = bytes_of(lambda m=model, o=optimizer: train(m, o, range(1, 3))) / ordinary_bytes
        train(model, optimizer, range(3, STEPS))
        assert len(set(hvd.allgather_object(digest(model)))) == 1, f"{name}: the replicas differ"
        assert model.unused.grad is None, "a parameter that no rank uses has a gradient"
        assert torch.equal(model.unused, torch.ones(3, 3))
        # Nothing is lost: what was applied, and the mean of what the ranks have not sent yet, is the mean of all gradients.
        left = hvd.allgather_object(optimizer.state_dict()["compression"]["residuals"])
        applied = 0.0
        for number, (weight, total) in enumerate(zip(model.weights, totals, strict=False)):
            rest = sum(each[number + 1] for each in left).view(weight.shape) / size
            torch.testing.assert_close(-weight.detach() / factor + rest, total, rtol=1e-4, atol=1e-4, msg=f"{name} {op} {number}")
            applied += float((weight.detach() / factor).square().sum())
        assert applied > 0.2 * sum(float(total.square().sum()) for total in totals) / STEPS, f"{name}: almost nothing arrived"

assert shares["int8"] < 0.28 * (1 + 1 / size), shares  # all of it by alltoall, a part by allgather
assert shares["topk"] < 0.11, shares  # 8 bytes for one of twenty
assert shares["powersgd"] < 0.25, shares

# With nothing left out it is the ordinary mean, to rounding.
model, optimizer = make(hvd.Compression.topk(ratio=1.0))
train(model, optimizer, range(3))
for weight, other in zip(model.weights, plain.weights, strict=False):
    torch.testing.assert_close(weight, other, rtol=1e-5, atol=1e-5)

# A matrix of rank 1 goes through PowerSGD whole, and so does the next one, another of rank 1, but for rounding.
weight = nn.Parameter(torch.zeros(64, 64))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), compression=hvd.Compression.powersgd(rank=3))
expected = torch.zeros(64, 64)
for step in range(3):
    generator = torch.Generator().manual_seed(step)
    matrix = torch.outer(torch.randn(64, generator=generator), torch.randn(64, generator=generator))
    expected -= matrix * (size + 1) / 2
    optimizer.zero_grad()
    (weight * matrix * (rank + 1)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-3, atol=1e-3)

for name, compression in CHOICES.items():
    # A job goes on from a state as if it had not stopped, where every rank has its own.
    model, optimizer = make(compression)
    train(model, optimizer, range(4))
    state, parameters = optimizer.state_dict(), model.state_dict()
    state, parameters = ({**state, "compression": {**state["compression"]}}, {k: v.clone() for k, v in parameters.items()})
    train(model, optimizer, range(4, 8))
    again, other = make(compression)
    again.load_state_dict(parameters)
    other.load_state_dict(state)
    train(again, other, range(4, 8))
    assert digest(again) == digest(model), name
    # The state of another rank brings none of its residuals, and a broadcast leaves each rank its own.
    foreign = hvd.broadcast_object(state, 0)
    other.load_state_dict(foreign)
    assert bool(other.state_dict()["compression"]["residuals"]) == (rank == 0), name
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    own = optimizer.state_dict()["compression"]["residuals"]
    assert own, name
    assert torch.equal(own[1], hvd.broadcast_object(own, 0)[1]) == (rank == 0), name
    train(again, other, range(8, 9))
    assert len(set(hvd.allgather_object(digest(again)))) == 1, name
    torch.optim.SGD(model.parameters(), lr=1.0).load_state_dict(state)  # an optimizer without compression takes it, too
    # bfloat16 gradients, of which the residuals are float32.
    model, optimizer = make(compression, torch.bfloat16)
    train(model, optimizer, range(3), torch.bfloat16)
    assert len(set(hvd.allgather_object(digest(model)))) == 1, name
    # float64 travels whole: float32 would make infinities of it.
    weight = nn.Parameter(torch.zeros(64, 64, dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), compression=compression)
    (weight * 1e300).sum().backward()
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((64, 64), -1e300, dtype=torch.float64))
    # An infinite gradient on one rank is seen by all, changes nothing of what is to be sent, and spoils no later step.
    model, optimizer = make(compression)
    train(model, optimizer, range(2))
    optimizer.zero_grad()
    before = optimizer.state_dict()["compression"]
    first, *others = gradients_of(2, rank)
    model([first * float("inf") if rank == size - 1 else first, *others]).backward()
    optimizer.synchronize()
    assert not all(torch.isfinite(w.grad).all() for w in model.weights), name
    optimizer.zero_grad()  # a GradScaler leaves the step out
    after = optimizer.state_dict()["compression"]
    for part in ("residuals", "factors"):
        assert after[part].keys() == before[part].keys(), (name, part)
        assert all(torch.equal(after[part][number], tensor) for number, tensor in before[part].items()), (name, part)
    train(model, optimizer, range(3, 6))
    assert all(torch.isfinite(w).all() for w in model.weights), name

# What makes no sense.
for wrong in (
    lambda: hvd.allreduce(torch.ones(3), compression=hvd.Compression.int8),
    lambda: make(hvd.Compression.int8, op=hvd.Adasum),
    lambda: make(hvd.Compression.topk),
    lambda: make(hvd.Compression.powersgd),
    lambda: hvd.Compression.topk(ratio=0.0),
    lambda: hvd.Compression.powersgd(rank=0),
):
    try:
        wrong()
        raise RuntimeError("it was accepted")
    except ValueError as error:
        assert "ompression" in str(error), error

# A rank that has joined sends nothing, and its part would be lost.
for compression in CHOICES.values():
    model, optimizer = make(compression)
    train(model, optimizer, range(2))
    if rank < size - 1:
        try:
            train(model, optimizer, range(2, 3))
            raise RuntimeError("it was accepted")
        except hvd.CollectiveError as error:
            assert "hvd.join" in str(error), error
    hvd.join()

common.report(shares=shares)
