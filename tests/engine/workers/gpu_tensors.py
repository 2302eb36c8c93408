"""The torch API's way through NCCL, without a GPU (gpus_by_gloo.py). Everything is asked for twice, through Gloo and of the engine."""

import collective_core.torch as hvd
import common
import gpus_by_gloo
import torch
from collective_core.runtime import membership
from collective_core.torch import gpu, nccl

from collective_core import _native

platform = gpus_by_gloo.use()
few = hvd.ProcessSet([0, 1])
hvd.init(process_sets=[few] if common.SIZE > 2 else None)
rank, size = hvd.rank(), hvd.size()
assert hvd.nccl_enabled(), "this rank has what it takes"
assert not nccl.groups, "and nothing is connected before the first tensor"


def both(ask, *calls):
    """What `ask` gives both ways, which must be the same, by these calls of the process group."""
    platform.holds_all = False
    expected = ask()
    platform.holds_all, before = True, len(platform.seen)
    got = ask()
    assert len(got) == len(expected)
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs), (mine, theirs)
    assert set(platform.seen[before:]) - {"get_error"} == set(calls), platform.seen[before:]


def rows(count, dtype=torch.float32):
    return (torch.arange(count * 3).reshape(count, 3) % 7 + 10 * rank).to(dtype)


assert (hvd.allreduce(torch.full((5,), float(rank)), op=hvd.Sum) == size * (size - 1) / 2).all()
assert hvd.nccl_enabled()
assert set(nccl.groups) == {0}
for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int32, torch.int64):
    for op in (hvd.Sum, hvd.Min, hvd.Max, hvd.Product):
        both(lambda dtype=dtype, op=op: [hvd.allreduce(rows(4, dtype) % 3, op=op)], "allreduce")
    both(lambda dtype=dtype: [hvd.broadcast(rows(4, dtype), size - 1), hvd.broadcast_(rows(2, dtype), 0)], "broadcast")
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    both(lambda dtype=dtype: [hvd.allreduce(size * rows(4, dtype))], "allreduce")
    both(lambda dtype=dtype: [hvd.allreduce_(size * rows(4, dtype), prescale_factor=2.0, postscale_factor=0.5)], "allreduce")
both(lambda: [hvd.allreduce(rows(4, torch.int16), op=hvd.Sum), hvd.allreduce(rows(4, torch.int64)), hvd.allreduce(rows(1), op=hvd.Adasum)])
both(lambda: [hvd.allreduce(torch.tensor(float(rank)), op=hvd.Sum), hvd.broadcast(torch.tensor(rank > 0), 1)], "allreduce", "broadcast")
both(lambda: [hvd.allreduce_(rows(4).t(), op=hvd.Sum), hvd.broadcast_(rows(4).t(), 1)], "allreduce", "broadcast")  # not contiguous
both(lambda: hvd.grouped_allreduce([rows(4), rows(2), rows(3, torch.float64)], op=hvd.Sum), "allreduce")
# float16 whose sum overflows though the average does not: it is divided first.
assert torch.equal(hvd.allreduce(torch.full((3,), 60000.0, dtype=torch.float16)), torch.full((3,), 60000.0, dtype=torch.float16))

for dtype in (torch.float32, torch.int16, torch.bool, torch.bfloat16):  # also what NCCL does not reduce
    both(lambda dtype=dtype: [hvd.allgather(rows(2, dtype))], "_allgather_base")
    both(lambda dtype=dtype: [hvd.allgather(rows(rank, dtype))], "broadcast")
    both(lambda dtype=dtype: hvd.alltoall(rows(size, dtype), [1] * size), "alltoall_base")
both(lambda: [hvd.allgather(rows(0)), hvd.alltoall(rows(0))])
both(lambda: [hvd.allgather(torch.arange(6.0).reshape(2, 3).t())], "_allgather_base")  # not contiguous
both(lambda: hvd.grouped_allgather([rows(1), rows(rank)]), "_allgather_base", "broadcast")
splits = torch.tensor([(rank + other) % 3 for other in range(size)], dtype=torch.int32)
both(lambda: hvd.synchronize(hvd.alltoall_async(rows(int(splits.sum())), splits)), "alltoall_base")
for op in (hvd.Sum, hvd.Average, hvd.Min, hvd.Max, hvd.Product):
    both(lambda op=op: [hvd.reducescatter(rows(2 * size), op=op)], "_reduce_scatter_base")
    both(lambda op=op: [hvd.reducescatter(rows(2 * size + 1), op=op)], "allreduce")
both(lambda: [hvd.reducescatter(rows(1), op=hvd.Average, prescale_factor=2.0, postscale_factor=0.5)], "allreduce")
both(lambda: [hvd.reducescatter(rows(size, torch.int64), op=hvd.Sum)], "_reduce_scatter_base")
both(lambda: [hvd.reducescatter(rows(size, torch.int16), op=hvd.Sum), hvd.reducescatter(rows(size, torch.int64), op=hvd.Average)])
kept = size * rows(2 * size, torch.float16)
both(lambda: [hvd.reducescatter(kept, op=hvd.Average)], "_reduce_scatter_base")
assert torch.equal(kept, size * rows(2 * size, torch.float16)), "the input was changed"
sparse = torch.sparse_coo_tensor(torch.tensor([[rank, 5] * (rank % 2)]), torch.ones(2 * (rank % 2), 2), (9, 2))
both(lambda: [hvd.synchronize(hvd.sparse_allreduce_async(sparse, "rows")).to_dense()], "broadcast")
if size > 2 and rank < 2:
    both(lambda: [hvd.allgather(rows(rank + 1), process_set=few)], "broadcast", "allreduce")  # the first: connected and tried
    both(lambda: [hvd.reducescatter(rows(4), process_set=few)], "_reduce_scatter_base")


# Gradients take the same way.
def gradient(ask):
    tensor = rows(size).requires_grad_()
    (ask(tensor) * (rank + 2.0)).sum().backward()
    return [tensor.grad]


both(lambda: gradient(hvd.allgather), "_allgather_base", "allreduce")
both(lambda: gradient(hvd.alltoall), "alltoall_base")
both(lambda: gradient(hvd.reducescatter), "_reduce_scatter_base", "_allgather_base")


def training():
    """Weights after steps: a bucket for each type, in the memory where the parameters are."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 4).double())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.125), model.named_parameters())
    for step in range(4):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        model[1](model[0](torch.full((2, 8), 1.0 + rank)).double()).sum().backward()
        optimizer.step()
    kinds = {bucket.dtype for bucket in optimizer._reducer.buckets}
    assert kinds == {torch.float32, torch.float64}
    return [p.detach().clone() for p in model.parameters()]


platform.holds_all = False
expected, platform.holds_all = training(), True
for mine, theirs in zip(training(), expected, strict=True):
    torch.testing.assert_close(mine, theirs)


def without_rank_0():
    got = []
    if rank > 0:
        got = [hvd.allreduce(rows(4)), hvd.broadcast(rows(4), size - 1), hvd.allgather(rows(rank)), *hvd.alltoall(rows(size), [1] * size)]
        got += [hvd.reducescatter(rows(size + 1), op=op) for op in (hvd.Average, hvd.Min, hvd.Product)]
        got += [hvd.reducescatter(rows(size, torch.int32), op=hvd.Max)]
        got += [hvd.allreduce(rows(4, torch.float16))]
    hvd.join()
    return got


both(without_rank_0, "allreduce", "broadcast", "_reduce_scatter_base", "alltoall_base")

# Other ranks' wishes differ: an error on all, and nothing was started.
for different in (lambda: hvd.allreduce(torch.ones(10 + rank), name="odd"), lambda: hvd.allgather(rows(2)[:, : 1 + rank % 2], name="odd")):
    before = len(platform.seen)
    try:
        different()
        problem = "none"
    except hvd.HorovodInternalError as error:
        problem = error.kind
    assert problem == "mismatch", problem
    assert set(platform.seen[before:]) <= {"get_error"}

# What is dropped without being waited for does no harm; commit() waits for what is under way.
hvd.allreduce_async(rows(1000), name="dropped")
state = hvd.elastic.TorchState(step=1)
state.commit()
assert not any(group._under_way for group in nccl.groups.values())
assert membership.failure() is None

# Another job of the same process connects anew.
hvd.shutdown()
assert not nccl.groups
hvd.init()
assert (hvd.allreduce(torch.full((5,), float(rank)), op=hvd.Sum) == size * (size - 1) / 2).all()
assert set(nccl.groups) == {0}
_native.check_peers(0)
assert not gpu._copying
common.report(done=True)
