"""Horovod's functions on torch tensors: types, asynchronous calls in different orders, gradients, objects."""
# ruff: noqa: PT017 - worker scripts run without pytest

import collective_core.torch as hvd
import common
import torch

hvd.init()
rank, size = hvd.rank(), hvd.size()
torch.manual_seed(1234)


def same(got, want):
    assert got.dtype == want.dtype, (got.dtype, want.dtype)
    assert got.shape == want.shape, (got.shape, want.shape)
    assert torch.equal(got, want), (got - want).abs().max()


def rank_order(parts, average):
    wide = torch.float32 if parts[0].dtype in (torch.float16, torch.bfloat16) else parts[0].dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    if average:
        total = total / size if wide.is_floating_point else torch.div(total, size, rounding_mode="trunc")
    return total.to(parts[0].dtype)


for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8):
    large = [1_400_003] if dtype in (torch.float32, torch.bfloat16, torch.int64) else []
    for count in [0, 1, 1031, *large]:
        if dtype.is_floating_point:
            everyone = [(torch.randn(count) * 10).to(dtype) for _ in range(size)]
        else:
            everyone = [torch.randint(0 if dtype == torch.uint8 else -50, 50, (count,)).to(dtype) for _ in range(size)]
        mine = everyone[rank]
        same(hvd.allreduce(mine), rank_order(everyone, True))
        same(hvd.allreduce(mine, average=False), rank_order(everyone, False))
        same(hvd.allreduce_(mine.clone(), op=hvd.Sum), rank_order(everyone, False))
        same(hvd.synchronize(hvd.allreduce_async(mine, op=hvd.Sum)), rank_order(everyone, False))
        same(hvd.broadcast(mine, size - 1), everyone[size - 1])
        same(hvd.synchronize(hvd.broadcast_async_(mine.clone(), 0)), everyone[0])
        same(hvd.allgather(mine[: rank * 10]), torch.cat([everyone[r][: r * 10] for r in range(size)]))
same(hvd.allreduce(torch.tensor([True, rank == 0, False]), op=hvd.Sum), torch.tensor([True, True, False]))

# Not contiguous, scalar, compressed.
base = torch.arange(12.0).reshape(3, 4)
same(hvd.allreduce_(base.t().clone().t(), op=hvd.Sum), base * size)
view = torch.zeros(4, 6)
hvd.allreduce_(view[:, ::2].add_(1.0), op=hvd.Sum)
same(view[:, ::2].contiguous(), torch.full((4, 3), float(size)))
same(view[:, 1::2].contiguous(), torch.zeros(4, 3))
same(hvd.allreduce(torch.tensor(float(rank)), op=hvd.Sum), torch.tensor(float(sum(range(size)))))
for compression, half in ((hvd.Compression.fp16, torch.float16), (hvd.Compression.bf16, torch.bfloat16)):
    everyone = [torch.randn(5000) for _ in range(size)]
    got = hvd.allreduce(everyone[rank], compression=compression)
    same(got, rank_order([e.to(half) for e in everyone], True).float())

# Each rank submits in an order of its own; rank 0's order wins and nobody waits for ever.
names = [f"t{i}" for i in range(12)]
order = sorted(names, key=lambda n: (int(n[1:]) * 7 + rank * 5) % 12)
handles = {n: hvd.allreduce_async(torch.full((1000 * (int(n[1:]) + 1),), float(int(n[1:]))), name=n, op=hvd.Sum) for n in order}
for name in reversed(names):
    result = hvd.synchronize(handles[name])
    same(result, torch.full((1000 * (int(name[1:]) + 1),), float(int(name[1:]) * size)))
# The same with blocking calls among them.
if rank % 2:
    handle = hvd.allreduce_async(torch.ones(3), name="late", op=hvd.Sum)
    same(hvd.allreduce(torch.ones(2), name="now", op=hvd.Sum), torch.full((2,), float(size)))
else:
    same(hvd.allreduce(torch.ones(2), name="now", op=hvd.Sum), torch.full((2,), float(size)))
    handle = hvd.allreduce_async(torch.ones(3), name="late", op=hvd.Sum)
same(hvd.synchronize(handle), torch.full((3,), float(size)))
if rank == 0:
    handle = hvd.allreduce_async(torch.ones(3), name="late2", op=hvd.Sum)
    hvd.barrier()
else:
    hvd.barrier()
    handle = hvd.allreduce_async(torch.ones(3), name="late2", op=hvd.Sum)
same(hvd.synchronize(handle), torch.full((3,), float(size)))
handle = hvd.allreduce_async_(torch.ones(10))
while not hvd.poll(handle):
    pass
hvd.synchronize(handle)
assert hvd.synchronize(handle) is None, "Horovod's answer to a handle that was synchronized already"
try:
    hvd.poll(handle)
    raise AssertionError("a handle was accepted that was synchronized already")
except hvd.CollectiveError as error:
    assert "synchronized already" in str(error)
    assert isinstance(error, ValueError), "what Horovod raises"

# Autograd is told of tensors that were changed in place, whichever way, and says so where it has saved one.
tensor = torch.ones(4)
for change in (
    lambda: [hvd.allreduce_(tensor, name="again") for _ in range(3)],
    lambda: hvd.allreduce_(tensor[::2], op=hvd.Max),
    lambda: hvd.allreduce_(tensor, op=hvd.Adasum),
    lambda: hvd.synchronize(hvd.allreduce_async_(tensor)),
    lambda: hvd.grouped_allreduce_([tensor, torch.ones(1)]),
    lambda: hvd.synchronize(hvd.grouped_allreduce_async_([tensor.view(2, 2)])),
    lambda: hvd.broadcast_(tensor, 0),
    lambda: hvd.synchronize(hvd.broadcast_async_(tensor.detach(), 0)),
    lambda: hvd.broadcast_parameters({"of": tensor}, 0),
):
    x = torch.ones(4, requires_grad=True)
    y = x * tensor
    version = tensor._version
    changed = change()
    assert tensor._version > version
    assert not isinstance(changed, list) or len(changed) != 3 or tensor._version >= version + 3
    try:
        y.sum().backward()
        raise AssertionError("a gradient of values that were overwritten")
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error), error
with torch.inference_mode():
    tensor = torch.ones(4)
hvd.allreduce_(tensor)
# A view that PyTorch negates when it is read.
negative = torch.complex(torch.ones(3), torch.full((3,), 2.0 + rank)).conj().imag
assert negative.is_neg()
same(hvd.allreduce(negative, op=hvd.Sum), torch.full((3,), -sum(2.0 + r for r in range(size))))
same(hvd.broadcast(negative, size - 1), torch.full((3,), -1.0 - size))
hvd.allreduce_(negative, op=hvd.Max)
same(negative.resolve_neg(), torch.full((3,), -2.0))

# Gradients of collectives, as Horovod forms them.
x = torch.full((3,), float(rank + 1), requires_grad=True)
hvd.allreduce(x, op=hvd.Sum).sum().backward()
same(x.grad, torch.full((3,), float(size)))
x = torch.ones(rank + 1, 2, requires_grad=True)
gathered = hvd.allgather(x)
(gathered * torch.arange(float(gathered.shape[0])).unsqueeze(1)).sum().backward()
begin = sum(range(1, rank + 1))
same(x.grad, torch.arange(float(begin), float(begin + rank + 1)).unsqueeze(1).expand(-1, 2))
x = torch.ones(2, requires_grad=True)
hvd.broadcast(x, 0).sum().backward()
same(x.grad, torch.full((2,), 1.0 if rank == 0 else 0.0))
for op, factor in ((hvd.Sum, float(size)), (hvd.Average, 1.0)):
    x = torch.ones(2 * size, 3, requires_grad=True)
    (hvd.reducescatter(x, op=op) * (rank + 1.0)).sum().backward()
    same(x.grad, torch.arange(1.0, size + 1).repeat_interleave(2).unsqueeze(1).expand(-1, 3) * factor)
x = torch.full((size, 2), float(rank), requires_grad=True)
(hvd.alltoall(x) * (rank + 1.0)).sum().backward()
same(x.grad, torch.arange(1.0, size + 1).unsqueeze(1).expand(-1, 2))


def second_derivatives(operation, x):
    """Of the sum of cubes of what a linear operation gives; and what they are by the operation's gradient, which is tested above."""
    weights, x = torch.arange(1.0, x.numel() + 1, dtype=x.dtype).view(x.shape) + rank, x.requires_grad_()
    y = operation(x)
    (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((first * weights).sum(), x)
    (want,) = torch.autograd.grad((operation(x) * (6 * y * operation(weights)).detach()).sum(), x)
    return second, want


rows = torch.arange(size * 2.0, dtype=torch.float64).view(-1, 1) + rank + 1
for operation in (
    lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5),
    hvd.allreduce,
    lambda x: hvd.grouped_allreduce([x, 2 * x])[1],
    lambda x: hvd.grouped_allreduce([x[:1], x[1:]], op=hvd.Sum)[1],
    lambda x: hvd.allgather(x[: 1 + rank]),
    lambda x: torch.cat(hvd.grouped_allgather([x[:1], x[: 1 + rank]])),
    lambda x: hvd.broadcast(x, size - 1),
    lambda x: hvd.reducescatter(x, op=hvd.Sum),
    lambda x: torch.cat(hvd.grouped_reducescatter([x, x[1:]])),
    hvd.alltoall,
    lambda x: hvd.alltoall(x[: size + 1], splits=[2] + [1] * (size - 1))[0],
):
    second, want = second_derivatives(operation, rows.clone())
    assert torch.allclose(second, want, rtol=1e-12), (second, want)

# Batches of different sizes: all derivatives are those of one batch on one rank.
batches = [torch.randn(2 + r, 3, 2, dtype=torch.float64) for r in range(size)]
norms = [kind(3).double() for kind in (torch.nn.BatchNorm1d, hvd.SyncBatchNorm)]
derivatives = []
for norm, x in zip(norms, (torch.cat(batches), batches[rank]), strict=True):
    torch.nn.init.constant_(norm.weight, 1.5)
    (first,) = torch.autograd.grad((norm(x.requires_grad_()) ** 3).sum(), x, create_graph=True)
    (of_weight, of_input) = torch.autograd.grad((first**3).sum(), (norm.weight, x))
    derivatives.append((hvd.allreduce(of_weight, op=hvd.Sum) / (size if norm is norms[0] else 1), of_input))
(weight_alone, alone), (weight_together, together) = derivatives
assert torch.allclose(together, alone.split([len(batch) for batch in batches])[rank], rtol=1e-9), (together, alone)
assert torch.allclose(weight_together, weight_alone, rtol=1e-9), (weight_together, weight_alone)

# A batch without samples on all ranks has no statistics.
before = norms[1].state_dict()
before = {name: value.clone() for name, value in before.items()}
empty = torch.empty(0, 3, 2, dtype=torch.float64, requires_grad=True)
result = norms[1](empty)
assert result.shape == empty.shape
result.sum().backward()
assert torch.isfinite(norms[1].weight.grad).all()
assert all(torch.equal(value, before[name]) for name, value in norms[1].state_dict().items() if name.startswith("running"))

assert hvd.broadcast_object({"epoch": 3, "r": rank}, 0) == {"epoch": 3, "r": 0}
assert hvd.broadcast_object(b"x" * 100_000 if rank == size - 1 else None, size - 1) == b"x" * 100_000
assert hvd.allgather_object(["a"] * rank) == [["a"] * r for r in range(size)]
try:
    hvd.allreduce(torch.ones(2, dtype=torch.complex32))
    raise AssertionError("accepted")
except hvd.HorovodInternalError as error:
    # The same everywhere, and of the tensor's own type.
    assert "cannot be sent" in str(error)
    assert "torch.complex32" in str(error)
    assert "different things" not in str(error)
    assert "uint8" not in str(error)
try:
    hvd.allreduce(torch.ones(2), average=True, op=hvd.Sum)
    raise AssertionError("accepted")
except ValueError:
    pass
assert not hvd.nccl_built()
assert not hvd.mpi_enabled()
hvd.barrier()
common.report(done=True)
hvd.shutdown()
