"""Process sets: membership, every collective in them, roots, errors, removal, sets at work at the same time."""
# ruff: noqa: PT017 - worker scripts run without pytest

import collective_core.torch as hvd
import common
import torch

hvd.init()
rank, size = hvd.rank(), hvd.size()
assert size >= 3
even, odd, last_two = list(range(0, size, 2)), list(range(1, size, 2)), [size - 2, size - 1]
evens = hvd.ProcessSet(even)
assert evens.process_set_id is None
assert evens.rank() is None
hvd.add_process_set(evens)
odds = hvd.add_process_set(odd)
tail = hvd.add_process_set(last_two)
assert [s.process_set_id for s in (hvd.global_process_set, evens, odds, tail)] == [0, 1, 2, 3]
assert hvd.global_process_set.ranks == list(range(size))
assert hvd.global_process_set.size() == size
assert hvd.global_process_set.rank() == rank
assert hvd.get_process_set_ids_and_ranks() == {0: list(range(size)), 1: even, 2: odd, 3: last_two}
mine, members = (evens, even) if rank % 2 == 0 else (odds, odd)
other = odds if mine is evens else evens
assert mine.included()
assert not other.included()
assert mine.rank() == members.index(rank)
assert str(evens) == f"ProcessSet(process_set_id=1, ranks={even}, mpi_comm=None)"
assert mine.size() == len(members)
assert other.rank() is None
assert other.size() == size - len(members)

for count in (5, 300_000):
    total = hvd.allreduce(torch.full((count,), float(rank)), op=hvd.Sum, process_set=mine)
    assert torch.equal(total, torch.full((count,), float(sum(members))))
    mean = hvd.allreduce(torch.full((count,), float(rank)), process_set=mine)
    assert torch.equal(mean, torch.full((count,), float(sum(members)) / len(members)))
    root = members[-1]
    assert torch.equal(hvd.broadcast(torch.full((count,), rank), root, process_set=mine), torch.full((count,), root))
    gathered = hvd.allgather(torch.full((count,), rank), process_set=mine)
    assert torch.equal(gathered, torch.tensor(members).repeat_interleave(count))
    part = hvd.reducescatter(torch.full((count * len(members),), rank), op=hvd.Sum, process_set=mine)
    assert torch.equal(part, torch.full((count,), sum(members)))
    swapped = hvd.alltoall(torch.full((count * len(members),), rank), process_set=mine)
    assert torch.equal(swapped, torch.tensor(members).repeat_interleave(count))
    assert hvd.grouped_allreduce([torch.ones(2), torch.ones(3)], op=hvd.Sum, process_set=mine)[1].tolist() == [len(members)] * 3
hvd.barrier(process_set=mine)
assert hvd.broadcast_object(("from", rank), members[0], process_set=mine) == ("from", members[0])
assert hvd.allgather_object(rank, process_set=mine) == members

# A set does not wait for ranks outside it, nor for another set.
if rank in last_two:
    handle = hvd.allreduce_async(torch.ones(4), op=hvd.Sum, process_set=tail, name="both")
    hvd.allreduce(torch.ones(4), op=hvd.Sum, process_set=mine, name="both")
    assert hvd.synchronize(handle).tolist() == [2.0] * 4
else:
    hvd.allreduce(torch.ones(4), op=hvd.Sum, process_set=mine, name="both")

# Gradients inside a set, with each set at its own.
x = torch.full((2,), float(rank), requires_grad=True)
(hvd.allgather(x, process_set=mine) * float(rank + 1)).sum().backward()
assert torch.allclose(x.grad, torch.full((2,), sum(r + 1 for r in members) / len(members))), x.grad

# A disagreement names the ranks by their numbers in the job, and concerns the set alone.
if rank in last_two:
    try:
        hvd.allreduce(torch.ones(3 if rank == size - 1 else 2), process_set=tail, name="w")
        raise RuntimeError("accepted")
    except hvd.HorovodInternalError as error:
        assert f"rank {size - 1} (host" in str(error), error
        assert error.ranks == (size - 1,), error.ranks
hvd.barrier()
for call, text in (
    (lambda: hvd.allreduce(torch.ones(1), process_set=other), "is not in process set"),
    (lambda: hvd.broadcast(torch.ones(1), (set(range(size)) - set(members)).pop(), process_set=mine), "root rank"),
    (lambda: hvd.allreduce(torch.ones(1), process_set=hvd.ProcessSet([0])), "add_process_set"),
):
    try:
        call()
        raise RuntimeError("accepted")
    except hvd.HorovodInternalError as error:
        assert text in str(error), error
        assert isinstance(error, ValueError), "what Horovod raises"
for wrong in ([0, size], even, [], [0, 0], ["a"], [rank]):
    try:
        hvd.add_process_set(wrong)
        raise RuntimeError(f"{wrong} was accepted")
    except ValueError:
        pass

model = torch.nn.Linear(3, 1)
torch.nn.init.constant_(model.weight, float(rank))
hvd.broadcast_parameters(model.state_dict(), root_rank=members[0], process_set=mine)
assert (model.weight == members[0]).all()
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), process_set=mine)
model(torch.full((1, 3), float(rank))).sum().backward()
optimizer.step()
want = members[0] - sum(members) / len(members)
assert torch.allclose(model.weight, torch.full((1, 3), want)), (model.weight, want)
norm = hvd.SyncBatchNorm(2, process_set=mine)
norm(torch.full((4, 2), float(rank)))
assert torch.allclose(norm.running_mean, torch.full((2,), 0.1 * sum(members) / len(members)))

invented = hvd.ProcessSet([rank])
invented.process_set_id = 99
try:
    hvd.allreduce(torch.ones(1), process_set=invented)
    raise RuntimeError("a process set that nobody has added was accepted")
except ValueError as error:
    assert "is not registered" in str(error)

hvd.barrier()
assert hvd.remove_process_set(tail)
assert tail.process_set_id is None
assert not hvd.remove_process_set(hvd.global_process_set)
assert not hvd.remove_process_set(tail)
again = hvd.add_process_set(tail)
assert (again, again.process_set_id) == (tail, 4)
if rank in last_two:
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=again).item() == 2.0
hvd.barrier()
hvd.shutdown()
assert again.process_set_id is None
first = hvd.ProcessSet([0, 1])
try:
    hvd.init(process_sets=[first, hvd.ProcessSet(range(size))])
    raise RuntimeError("a second set of all ranks was accepted")
except ValueError:
    assert not hvd.is_initialized()
    assert first.process_set_id is None
hvd.init(process_sets=[first])
assert first.process_set_id == 1
if rank < 2:
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=first).item() == 2.0
common.report(done=True)
hvd.shutdown()
