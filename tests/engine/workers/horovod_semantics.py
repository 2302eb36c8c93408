"""Horovod's rules, where the engine's differ on purpose: names in flight, and what goes on when a rank has joined."""

import os
import sys

os.environ["COLLECTIVE_SEMANTICS"] = "horovod"

import collective_core.torch as hvd
import common
import torch

import collective_core as cc

if sys.argv[1:] == ["one"] and common.RANK == 1:
    os.environ["COLLECTIVE_SEMANTICS"] = ""
try:
    hvd.init()
except hvd.CollectiveError as error:
    common.report(error=str(error), kind=error.kind, ranks=list(error.ranks))
    sys.exit(0)
rank, size = hvd.rank(), hvd.size()


def refused(call, *arguments, error=hvd.HorovodInternalError, **options):
    try:
        call(*arguments, **options)
    except error as raised:
        return str(raised)
    raise RuntimeError(f"{call.__name__} was not refused")


# A name may be in flight once. The other ranks do not know of the second one: rank 0 alone asks for it. Where there are no others, nothing
# is in flight for long.
tensor, many = torch.ones(5), torch.ones(size * 2)
starts = {
    "allreduce": lambda: hvd.allreduce_async(tensor, name="twice"),
    "allgather": lambda: hvd.allgather_async(tensor, name="twice"),
    "broadcast": lambda: hvd.broadcast_async(tensor, 0, name="twice"),
    "alltoall": lambda: hvd.alltoall_async(many, name="twice"),
    "reducescatter": lambda: hvd.reducescatter_async(many, name="twice"),
}
handles = []
if rank == 0 and size > 1:
    handles = [start() for start in starts.values()]  # one of each kind: these are different names there
    for kind, start in starts.items():
        text = refused(start, error=ValueError)
        assert f"an {kind} with the name 'twice' is in flight already" in text, text
    assert "in flight" in refused(hvd.allreduce, tensor, name="twice", error=ValueError)
hvd.barrier()
if rank > 0 or size == 1:
    handles = [start() for start in starts.values()]
hvd.barrier()  # all are done now; a name is free when its operation has been synchronized, not only when that is done
for start in starts.values():
    assert "is in flight already" in refused(start, error=ValueError)
assert "is in flight already" in refused(hvd.allreduce_, tensor, name="twice", error=ValueError)  # this one does not even queue
for handle in handles:
    hvd.synchronize(handle)
for _ in range(3):  # one after the other
    assert hvd.allreduce(tensor, name="twice", op=hvd.Sum).tolist() == [size] * 5
    assert hvd.synchronize(hvd.allreduce_async(tensor, name="twice", op=hvd.Sum)).tolist() == [size] * 5
    for _ in range(2):
        assert cc.allreduce(tensor.numpy(), op=cc.Sum).tolist() == [size] * 5  # without a name

# Results that are never asked for keep their names; unnamed operations after a join have others.
forgotten = [hvd.allgather_async(tensor), hvd.allreduce_async(tensor)]

# Averages are over all ranks though one has joined; what cannot go on without it is an error of those who ask for it.
for joined in range(size):
    if rank != joined:
        for count in (3, 400_003):
            values = torch.arange(count).remainder(7) + 1
            whole = values * (size - 1)
            assert torch.equal(hvd.allreduce(values.float()), whole.float() / size)
            assert torch.equal(hvd.allreduce(values), whole.div(size, rounding_mode="trunc"))
            assert torch.equal(hvd.allreduce(values.float(), op=hvd.Sum), whole.float())
            summed = hvd.grouped_allreduce([values.float(), values.double()])
            assert torch.equal(summed[0], whole.float() / size)
            assert torch.equal(summed[1], whole.double() / size)
        same = hvd.allreduce(torch.full((5,), 2.0), op=hvd.Adasum)
        assert torch.allclose(same, torch.full((5,), 2.0)), same
        root = (joined + 1) % size
        sparse = torch.sparse_coo_tensor([[0]], [1.0], (size,))
        for text in (
            refused(hvd.allgather, tensor),
            refused(hvd.broadcast, tensor, root),
            refused(hvd.alltoall, many),
            refused(hvd.reducescatter, many),
            refused(lambda some: hvd.synchronize(hvd.sparse_allreduce_async(some, "sparse")), sparse),
        ):
            assert "allreduce and barrier alone go on while a rank has joined" in text, text
        hvd.barrier()
    last = hvd.join()
    assert size == 1 or last != joined
    assert hvd.allgather_object(last) == [last] * size

# A rank without data: the others' optimizer makes its first steps, and agrees on its plan, while that has joined.
model = torch.nn.Linear(2, 1, bias=False)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
before = model.weight.detach().clone()
steps = 3 if rank or size == 1 else 0
for _ in range(steps):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
hvd.join()
if steps:
    share = (size - 1) / size if size > 1 else 1.0
    assert torch.allclose(model.weight, before - 3 * share, atol=1e-5), (model.weight, before)
common.report(done=True)
hvd.shutdown()
