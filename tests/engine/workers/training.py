"""DistributedOptimizer against one process that sees the whole batch."""
# ruff: noqa: PT017 - worker scripts run without pytest

import copy
import hashlib
import itertools
import os
import warnings

import common

os.environ.setdefault("COLLECTIVE_FUSION_MB", "0.002")  # several buckets even for a small model

import collective_core.torch as hvd
import torch
from collective_core.torch import handles
from torch import nn

hvd.init()
rank, size = hvd.rank(), hvd.size()
# As on a machine with cores to spare: where all compute already, nothing is summed before the pass has ended.
handles.can_overlap = lambda: True
BATCH = 12  # divisible by 2, 3 and 4


class Net(nn.Module):
    """Branches whose gradients arrive in an order that depends on the rank; one layer that is never used."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.left = nn.Linear(16, 16)
        self.right = nn.Linear(16, 16)
        self.unused = nn.Linear(3, 3)
        self.last = nn.Linear(16, 4)

    def forward(self, x, swap=False):
        x = torch.tanh(self.first(x))
        pair = [self.left, self.right]
        a, b = reversed(pair) if swap else pair
        return self.last(torch.tanh(a(x)) + torch.tanh(b(x)))


def make(optimizer, seed=0):
    torch.manual_seed(seed)
    model = Net()
    return model, optimizer(model.parameters())


def data(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 8, generator=generator), torch.randint(0, 4, (BATCH,), generator=generator)


def train(model, optimizer, steps, share, passes=1, swap=False):
    for step in range(steps):
        optimizer.zero_grad()
        for i in range(passes):
            x, y = data(step * passes + i)
            nn.functional.cross_entropy(model(x[share], swap=swap), y[share]).backward()
        optimizer.step()


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
}
mine = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
digest = hashlib.sha256()
for (name, build), passes in itertools.product(OPTIMIZERS.items(), (1, 2)):
    reference, plain = make(build)
    train(reference, plain, 6, slice(None), passes)
    model, wrapped = make(build, seed=rank)  # different parameters until they are broadcast
    wrapped = hvd.DistributedOptimizer(wrapped, named_parameters=model.named_parameters(), backward_passes_per_step=passes)
    assert isinstance(wrapped, type(plain))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    train(model, wrapped, 6, mine, passes, swap=rank % 2 == 1)
    for (key, want), got in zip(reference.named_parameters(), model.parameters(), strict=False):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-6, msg=f"{name} {passes} {key}")
        digest.update(got.detach().numpy().tobytes())
    # A layer that is never used holds up nothing: sums begin while the pass runs, in the order of the first rank.
    for i in range(passes):
        x, y = data(i)
        nn.functional.cross_entropy(model(x[mine], swap=rank % 2 == 1), y[mine]).backward()
    going = [bool(bucket.handle) for bucket in wrapped._reducer.buckets]
    assert going == [size > 1] * (len(going) - 1) + [False], going
    assert len(going) > 1 or os.environ["COLLECTIVE_FUSION_MB"] != "0.002"
    assert set(model.unused.parameters()) <= set(wrapped._reducer.buckets[-1 if size > 1 else 0].parameters)
    wrapped.step()
    assert hvd.allgather_object([p.tolist() for p in model.parameters()]) == size * [[p.tolist() for p in model.parameters()]]

# The state of one rank's optimizer reaches ranks that have none yet.
for name, build in OPTIMIZERS.items():
    model, optimizer = make(build)
    if rank == 0:
        train(model, optimizer, 3, slice(None))
        optimizer.param_groups[0]["lr"] = 0.05
    hvd.broadcast_parameters(model.named_parameters(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    states = hvd.allgather_object(optimizer.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert len(states[0]["state"]) >= 8, "no state was made"
    for other in states[1:]:
        assert other["param_groups"] == states[0]["param_groups"]
        for key, state in states[0]["state"].items():
            for field, value in state.items():
                assert torch.equal(torch.as_tensor(other["state"][key][field]), torch.as_tensor(value)), (name, key, field)
    copy_model, wrapped = copy.deepcopy(model), None
    wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    train(model, wrapped, 2, mine)
    reference = build(copy_model.parameters())
    reference.load_state_dict(states[0])
    train(copy_model, reference, 2, slice(None))
    for want, got in zip(copy_model.parameters(), model.parameters(), strict=False):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-6)

# Options.
model, optimizer = make(OPTIMIZERS["sgd"])
wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), gradient_predivide_factor=2.0)
scheduler = torch.optim.lr_scheduler.StepLR(wrapped, 1, gamma=0.5)
x, y = data(0)
nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
if size > 1:  # a single process has no reductions that could be disturbed
    try:
        wrapped.zero_grad()
        raise RuntimeError("zero_grad in the middle was accepted")
    except AssertionError as error:
        assert "prohibited" in str(error), error
wrapped.synchronize()
gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
reference, plain = make(OPTIMIZERS["sgd"])
nn.functional.cross_entropy(reference(x), y).backward()
for want, got in zip(reference.parameters(), gradients, strict=False):
    torch.testing.assert_close(got, torch.zeros_like(got) if want.grad is None else want.grad, rtol=1e-5, atol=1e-6)
with wrapped.skip_synchronize():
    wrapped.step()
scheduler.step()
assert wrapped.param_groups[0]["lr"] == 0.05
for p, g in zip(model.parameters(), gradients, strict=False):
    assert p.grad is None or torch.equal(p.grad, g), "a second reduction took place"

nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
wrapped.synchronize()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    wrapped.step()
assert any("skip_synchronize" in str(w.message) for w in caught)

if size > 1:
    nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
    try:
        nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
        raise RuntimeError("a second backward pass was accepted")
    except AssertionError as error:
        assert "backward_passes_per_step" in str(error), error
    wrapped.step()

parameters = list(model.parameters())
for names in ([("a", p) for p in parameters], [("a", parameters[0])], parameters):
    try:
        hvd.DistributedOptimizer(optimizer, named_parameters=names)
        raise AssertionError("wrong names were accepted")
    except ValueError:
        pass
for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
    model, optimizer = make(OPTIMIZERS["sgd"])
    wrapped = hvd.DistributedOptimizer(optimizer, compression=compression)
    train(model, wrapped, 3, mine)
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
common.report(digest=digest.hexdigest())
