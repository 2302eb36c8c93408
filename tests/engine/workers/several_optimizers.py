"""What an optimizer shares with others: names, options that a scheduler changes, memory, and what is left after an error."""
# ruff: noqa: PT017 - worker scripts run without pytest

import collective_core.torch as hvd
import common
import torch
from torch import nn

hvd.init()
rank, size = hvd.rank(), hvd.size()


def ones(model):
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    return model


def distributed(model, lr=0.0, **options):
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=lr), model.named_parameters(), **options)


# A scheduler that was made before the optimizer was wrapped changes the rate on every rank, also after a broadcast.
model = ones(nn.Linear(4, 2))
plain = torch.optim.SGD(model.parameters(), lr=1.0 if rank == 0 else 5.0, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.1)
wrapped = hvd.DistributedOptimizer(plain, model.named_parameters())
hvd.broadcast_optimizer_state(wrapped, 0)
assert wrapped.param_groups[0] is plain.param_groups[0]
for _ in range(3):
    wrapped.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    wrapped.step()
    scheduler.step()
assert abs(wrapped.param_groups[0]["lr"] - 1e-3) < 1e-9, wrapped.param_groups
weights = hvd.allgather(model.weight.detach().view(1, -1))
assert torch.equal(weights, weights[:1].expand(size, -1)), "the replicas differ"
assert plain.state[model.weight]["momentum_buffer"] is wrapped.state[model.weight]["momentum_buffer"]

# A layer that was frozen when the optimizer was wrapped, and one that is added later, with a sparse gradient: reduced at once. The
# second time the frozen one is needed before the ranks have agreed on anything, and rank 0 does not use what is added at first.
for first_needed, options in ((2, {}), (0, {}), (2, {"op": hvd.Adasum})):
    body, frozen, added = ones(nn.Linear(4, 4)), ones(nn.Linear(4, 4)), ones(nn.Embedding(3, 4, sparse=True))
    frozen.requires_grad_(False)
    parameters = [*body.parameters(), *frozen.parameters()]
    tuned = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.01), **options)
    for step in range(6):
        if step == first_needed:
            frozen.requires_grad_(True)
        if step == 3:
            tuned.add_param_group({"params": list(added.parameters()), "lr": 0.02})
        tuned.zero_grad()
        features = torch.full((1, 4), float(rank + 1))
        if step >= 3 and (rank or step > 3 or first_needed):
            features = features + added(torch.tensor([rank % 3]))
        frozen(body(features)).sum().backward()
        tuned.step()
        watched = [*parameters, added.weight]
        values = hvd.allgather(torch.cat([p.detach().flatten() for p in watched]).view(1, -1))
        assert torch.equal(values, values[:1].expand(size, -1)), (step, options, "the replicas differ")
        if not options:
            for parameter in (p for p in watched if p.grad is not None):
                gradients = hvd.allgather(parameter.grad.to_dense().reshape(1, -1))
                assert torch.equal(gradients, gradients[:1].expand(size, -1)), (step, "a gradient is this rank's own")
    assert (frozen.weight != 1).any()
    assert (added.weight != 1).any()

# Two optimizers: in the second step rank `size - 1` uses only one of the models, so its buckets come in another order.
small = nn.Linear(3, 3), nn.Linear(3, 3)
large = nn.Linear(300, 300), nn.Linear(300, 300)
for first, second in (small, large):
    ones(first), ones(second)
    optimizers = distributed(first), distributed(second)
    x = torch.ones(1, first.in_features)
    for step in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = first(x).sum()
        if step == 0 or rank != size - 1:
            loss = loss + 10.0 * second(x).sum()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        want = 10.0 if step == 0 else 10.0 * (size - 1) / size
        assert torch.allclose(first.bias.grad, torch.ones(())), (step, first.bias.grad)
        assert torch.allclose(second.bias.grad, torch.tensor(want)), (step, second.bias.grad)


# A compressor that leaves small tensors alone, and one that makes others shorter.
class Half(hvd.Compression.none):
    @staticmethod
    def compress(tensor):
        return (tensor.half(), tensor.dtype) if tensor.numel() > 4 else (tensor, None)

    @staticmethod
    def decompress(tensor, context):
        return tensor if context is None else tensor.to(context)


class FirstRow:
    @staticmethod
    def compress(tensor):
        return tensor[:1].clone(), tensor.shape

    @staticmethod
    def decompress(tensor, shape):
        return tensor.expand(shape)


for compression, groups in ((Half, None), (Half, 1), (FirstRow, None)):
    model = ones(nn.Linear(4, 2))
    wrapped = distributed(model, lr=1.0, compression=compression, groups=groups)
    for _ in range(2):
        wrapped.zero_grad()
        model(torch.full((1, 4), rank + 1.0)).sum().backward()
        wrapped.synchronize()
        assert torch.allclose(model.weight.grad, torch.full((2, 4), (size + 1) / 2)), (compression, model.weight.grad)
        assert torch.equal(model.bias.grad, torch.ones(2)), (compression, model.bias.grad)
        with wrapped.skip_synchronize():
            wrapped.step()

# Gradients lie in memory as their parameters do, and fused steps, which rely on that, are right.
for fused in (False, True):
    model = ones(nn.Conv2d(3, 2, 2, bias=False)).to(memory_format=torch.channels_last)
    wrapped = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0, fused=fused), model.named_parameters())
    x = torch.arange(12.0).view(1, 3, 2, 2)
    for step in range(2):
        wrapped.zero_grad(set_to_none=step == 0)
        model(x * (rank + 1)).sum().backward()
        wrapped.step()
        assert model.weight.grad.stride() == model.weight.stride(), "the gradient lies in another order"
    assert torch.allclose(model.weight.detach(), 1 - 2 * x.expand(2, 3, 2, 2) * (size + 1) / 2), (fused, model.weight)
# A rank whose parameters lie in another order is told, and sums nothing wrong.
model = nn.Conv2d(3, 2, 2, bias=False).to(memory_format=torch.channels_last if rank == 0 else torch.contiguous_format)
wrapped = distributed(model)
model(torch.ones(1, 3, 2, 2)).sum().backward()
try:
    wrapped.step()
    raise RuntimeError("parameters that lie in different orders were summed")
except hvd.HorovodInternalError as error:
    assert error.kind == "mismatch", error

# After an error the optimizer reports the same one again, and works when its cause is gone.
parameters = [nn.Parameter(torch.ones(n)) for n in (1000, 1000 + (rank == 0), 1000)]
wrapped = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1))
for _ in range(3):
    wrapped.zero_grad()
    sum(p.sum() for p in parameters).backward()
    try:
        wrapped.step()
        raise RuntimeError("different shapes were accepted")
    except hvd.HorovodInternalError as error:
        assert "the ranks ask for different things" in str(error), error
model = ones(nn.Linear(3, 1))
wrapped = distributed(model, lr=1.0)
model(torch.ones(1, 3)).sum().backward()
wrapped.load_state_dict(wrapped.state_dict())  # drops the step that had begun
wrapped.zero_grad()
model(torch.full((1, 3), rank + 1.0)).sum().backward()
wrapped.step()
assert torch.allclose(model.weight.detach(), torch.full((1, 3), 1 - (size + 1) / 2)), model.weight

# Gradients with a graph of their own.
model = ones(nn.Linear(3, 1, bias=False))
wrapped = distributed(model)
for _ in range(3):
    wrapped.zero_grad()
    model(torch.full((1, 3), rank + 1.0)).square().sum().backward(create_graph=True)
    wrapped.step()
    mean = sum(6.0 * (r + 1) ** 2 for r in range(size)) / size
    assert torch.allclose(model.weight.grad, torch.full((1, 3), mean)), model.weight.grad
    assert not model.weight.grad.requires_grad

# Hooks of a step run once, also after a state was loaded.
calls = []
wrapped = distributed(ones(nn.Linear(2, 1)))
wrapped.register_step_pre_hook(lambda *_: calls.append(1))
for _ in range(2):
    wrapped.step()
    wrapped.load_state_dict(wrapped.state_dict())
assert len(calls) == 2, calls

# A rank that is not in the process set trains alone.
only_first = hvd.add_process_set([0])
model = ones(nn.Linear(2, 1, bias=False))
for op in (hvd.Average, hvd.Adasum):
    wrapped = distributed(model, lr=1.0, process_set=only_first, op=op)
    nn.init.ones_(model.weight)
    wrapped.zero_grad()
    model(torch.full((1, 2), rank + 1.0)).sum().backward()
    wrapped.step()
    assert torch.allclose(model.weight.detach(), torch.full((1, 2), -float(rank))), (op, model.weight)
common.report(done=True)
hvd.shutdown()
