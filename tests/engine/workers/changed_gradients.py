"""What a program may do to gradients, parameters and process sets between steps: the replicas stay equal, and sums are of all ranks."""

import itertools

import collective_core.torch as hvd
import common
import torch
from torch import nn

hvd.init()
rank, size = hvd.rank(), hvd.size()
mean = sum(range(1, size + 1)) / size


def layer(width: int) -> nn.Linear:
    made = nn.Linear(width, width)
    with torch.no_grad():
        made.weight.fill_(1.0)
        made.bias.fill_(1.0)
    return made


def step(optimizer, *layers, change=None, expected=mean):
    """One step whose gradients' averages are known: those of the bias of the last layer are ``expected``."""
    optimizer.zero_grad()
    x = torch.full((1, layers[0].in_features), 1e-3, dtype=layers[0].weight.dtype)
    for part in layers:
        x = part(x)
    ((rank + 1.0) * x).sum().backward()
    optimizer.synchronize()
    bias = layers[-1].bias
    if bias.requires_grad:
        assert torch.allclose(bias.grad, torch.full_like(bias, expected)), (bias.grad.flatten()[:3], expected)
    if change is not None:
        change(layers)
    with optimizer.skip_synchronize():
        optimizer.step()
    values = torch.cat([p.detach().double().flatten() for part in layers for p in part.parameters()])
    everyone = hvd.allgather(values.view(1, -1))
    assert torch.equal(everyone, everyone[:1].expand(size, -1)), "the replicas differ"


def distributed(*layers, **options):
    return hvd.DistributedOptimizer(torch.optim.SGD([p for part in layers for p in part.parameters()], lr=1e-3), **options)


def put_elsewhere(layers):
    for part in layers:
        for p in part.parameters():
            p.grad.data = 0.5 * p.grad.data


def add_decay_with_a_graph(layers):
    for part in layers:
        for p in part.parameters():
            p.grad.add_(0.01 * p)


for width in (4, 600):  # small gradients, and some of more than 1 MiB
    first, second = layer(width), layer(width)
    optimizer = distributed(first, second)
    for change in (None, put_elsewhere, None, None, add_decay_with_a_graph, None, None):
        step(optimizer, first, second, change=change)

    # In another type than the optimizer was made for, from the first step on and later.
    for steps_before in (0, 2):
        first, second = layer(width), layer(width)
        optimizer = distributed(first, second)
        for _ in range(steps_before):
            step(optimizer, first, second)
        first.double()
        second.double()
        for _ in range(3):
            step(optimizer, first, second)

    # Only a part of the model in another type, in which a bucket cannot be.
    first, second = layer(width), layer(width)
    optimizer = distributed(first, second)
    for _ in range(3):
        optimizer.zero_grad()
        second(first(torch.ones(1, width)).to(second.weight.dtype)).sum().mul(rank + 1.0).backward()
        optimizer.step()
        for p in (first.weight, second.bias):
            gradients = hvd.allgather(p.grad.double().view(1, -1))
            assert torch.equal(gradients, gradients[:1].expand(size, -1)), "a gradient is this rank's own"
        assert torch.allclose(second.bias.grad, torch.full_like(second.bias, mean)), second.bias.grad[:3]
        assert (first.weight.grad != 0).all()
        second.double()

    # A layer goes and another comes.
    first, second = layer(width), layer(width)
    optimizer = distributed(first)
    step(optimizer, first)
    optimizer.param_groups.pop()
    optimizer.add_param_group({"params": list(second.parameters())})
    for _ in range(2):
        step(optimizer, first, second)

    # Gradients in memory that torch shares between processes.
    part = layer(width)
    optimizer = distributed(part)
    step(optimizer, part)
    part.weight.grad.share_memory_()
    for _ in range(2):
        step(optimizer, part)

    # One layer is trained instead of another, and again the other.
    first, second = layer(width), layer(width)
    second.requires_grad_(False)
    optimizer = distributed(first, second)
    step(optimizer, first, second)
    first.requires_grad_(False)
    second.requires_grad_(True)
    step(optimizer, first, second)
    step(optimizer, first, second)
    first.requires_grad_(True)
    second.requires_grad_(False)
    step(optimizer, first, second)
    assert (first.weight != 1).any()
    assert (second.weight != 1).any()

# What no rank has used is not moved by momentum and weight decay; what some have used is moved alike by all.
COMPRESSIONS = (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16)
for compression, as_views, op in itertools.product(COMPRESSIONS, (True, False), (hvd.Average, hvd.Sum)):
    parts = [layer(4), layer(600), layer(3)]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([p for part in parts for p in part.parameters()], lr=1e-3, momentum=0.9, weight_decay=0.1),
        compression=compression,
        op=op,
        gradient_as_bucket_view=as_views,
    )
    before = []
    for used in ((0, 1, 2), (0,), (0, 1), (0,), (1, 2), ()):  # by all; the next one by the last rank alone
        optimizer.zero_grad()
        alone = {number + 1 for number in used[-1:]} & {1, 2}
        for number in {*used, *(alone if rank == size - 1 else ())}:
            parts[number](torch.full((1, parts[number].in_features), 1e-3)).sum().backward()
        before = [part.weight.detach().clone() for part in parts]
        optimizer.step()
        for number, part in enumerate(parts):
            somebody = number in {*used, *alone}
            assert (part.weight.grad is not None) == somebody, (number, used)
            assert torch.equal(part.weight, before[number]) != somebody, (number, used)
            if number in alone and number not in used:
                torch.testing.assert_close(part.bias.grad, torch.full_like(part.bias, 1 / (size if op == hvd.Average else 1)))
            everywhere = hvd.allgather(part.weight.detach().view(1, -1))
            assert torch.equal(everywhere, everywhere[:1].expand(size, -1)), "the replicas differ"

# With gradients of its own the program may keep one; and one that it zeroes stays where it is.
part = layer(600)
optimizer = distributed(part, gradient_as_bucket_view=False)
step(optimizer, part)
kept, values = part.weight.grad, part.weight.grad.clone()
step(optimizer, part)
assert part.weight.grad is not kept
assert torch.equal(kept, values)
kept = part.weight.grad
optimizer.zero_grad(set_to_none=False)
((rank + 1.0) * part(torch.ones(1, 600))).sum().backward()
optimizer.step()
assert part.weight.grad is kept
assert torch.allclose(kept, torch.full_like(kept, mean))

# The same process set, removed and added again.
everyone = hvd.add_process_set(list(range(size - 1))) if size > 2 else None
if everyone is not None:
    part = layer(4)
    optimizer = distributed(part, process_set=everyone)
    for again in range(2):
        if everyone.included():
            optimizer.zero_grad()
            ((rank + 1.0) * part(torch.ones(1, 4))).sum().backward()
            optimizer.step()
            assert torch.allclose(part.bias.grad, torch.full((4,), sum(range(1, size)) / (size - 1)))
        if not again:
            hvd.remove_process_set(everyone)
            hvd.add_process_set(everyone)


# A gradient that could not be taken over when it was ready is taken over by the step.
class Failing(hvd.Compression.fp16):
    fails = False

    @classmethod
    def compress(cls, tensor):
        if cls.fails and tensor.dim() == 2:
            raise OSError("no compression today")
        return super().compress(tensor)


part = layer(600)
optimizer = distributed(part, compression=Failing)
step(optimizer, part)
optimizer.zero_grad()
Failing.fails = True
try:
    ((rank + 1.0) * part(torch.full((1, 600), 1.0))).sum().backward()
except OSError:
    Failing.fails = False
assert not Failing.fails, "a large gradient is taken over when it is ready"
optimizer.step()
assert torch.allclose(part.weight.grad, torch.full((600, 600), mean)), part.weight.grad


# A compressor whose result has the gradient's shape in one step and none in the next.
class Flattening(hvd.Compression.none):
    steps = 0

    @classmethod
    def compress(cls, tensor):
        return (tensor.flatten() if cls.steps % 2 else tensor), tensor.shape

    @classmethod
    def decompress(cls, tensor, context):
        return tensor.view(context)


part = layer(4)
optimizer = distributed(part, compression=Flattening)
for Flattening.steps in range(4):
    step(optimizer, part)
common.report(passed=True)
