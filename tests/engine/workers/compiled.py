"""torch.compile and compiled autograd beside the engine: what they compile computes what it does without them."""

from contextlib import nullcontext

import collective_core.torch as hvd
import common
import torch
import torch._dynamo
from torch import nn
from torch._dynamo import compiled_autograd

hvd.init()
rank, size = hvd.rank(), hvd.size()
torch.set_num_threads(1)


def make_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), hvd.SyncBatchNorm(4), nn.Tanh(), nn.Linear(4, 1))


def make():
    model = make_model()
    return model, hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), model.named_parameters())


def data(step):
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * step + rank))


def train(model, optimizer, forward, step, steps=3):
    for number in range(steps):
        optimizer.zero_grad()
        forward(data(number)).square().mean().backward()
        step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


model, optimizer = make()
expected = train(model, optimizer, model, optimizer.step)
everyone = hvd.allgather(expected.view(1, -1))
assert torch.equal(everyone, everyone[:1].expand(size, -1)), "the replicas differ"


def compare(what, got):
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5, msg=lambda text: f"{what}: {text}")
    torch._dynamo.reset()


# As docs/engine.md has it: the compiled model beside an optimizer of the model's own parameters.
model = make_model(seed=rank)  # the broadcast brings all ranks that of rank 0
optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
assert torch.equal(train(model, optimizer, torch.compile(model, backend="eager"), optimizer.step), expected)
torch._dynamo.reset()

# The model and the step, of which one is compiled to machine code.
for backend in ("eager", "inductor"):
    model, optimizer = make()
    step = torch.compile(optimizer.step, backend="eager")
    compare(backend, train(model, optimizer, torch.compile(model, backend=backend), step))

# A whole training step, with the gradients' hooks under the compiler's eyes; then with a compiled backward pass.
for compiles in (False, True):
    torch._dynamo.config.compiled_autograd = compiles
    model, optimizer = make()

    @torch.compile(backend="eager")
    def whole(x, model=model, optimizer=optimizer):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for number in range(3):
        whole(data(number))
    compare(f"a whole step, {compiles}", torch.cat([p.detach().flatten() for p in model.parameters()]))
torch._dynamo.config.compiled_autograd = False

# A compiled backward pass in which nothing is left to the interpreter.
results = []
for compiles in (False, True):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for number in range(3):
        optimizer.zero_grad()
        loss = model(data(number)).square().mean()
        with compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)) if compiles else nullcontext():
            loss.backward()
        optimizer.step()
    results.append(model.weight.detach().clone())
assert torch.equal(*results), results


# What reads the options of a wrapped optimizer, with no word to the interpreter.
whole = torch.compile(lambda x: x * optimizer.param_groups[0]["lr"], backend="eager", fullgraph=True)
assert torch.equal(whole(torch.ones(2)), torch.full((2,), 0.1))


# Collectives between what is compiled.
def several(x):
    handle = hvd.allreduce_async(x * 2, op=hvd.Sum)
    total = hvd.allreduce(x + 1, op=hvd.Sum) + hvd.synchronize(handle) + hvd.allgather(x).sum()
    return total + hvd.broadcast(x, 0) + hvd.grouped_allreduce([x, x], op=hvd.Sum)[1]


mine = torch.arange(3.0) + rank
assert torch.equal(torch.compile(several, backend="eager")(mine), several(mine))
common.report(done=True)
