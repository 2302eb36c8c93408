"""Uneven data: ranks that have joined take part in every collective without adding anything."""
# ruff: noqa: PT017 - worker scripts run without pytest

import collective_core.torch as hvd
import common
import torch

hvd.init()
rank, size = hvd.rank(), hvd.size()


def steps_of(r):
    return 2 + r  # the last rank has most data


for count in (3, 400_003):
    for step in range(steps_of(rank)):
        active = [r for r in range(size) if steps_of(r) > step]
        values = [torch.arange(count).remainder(7).add(r + 1) for r in active]
        mine = torch.arange(count).remainder(7).add(rank + 1)
        for dtype in (torch.float32, torch.int32, torch.bfloat16):
            total = sum(v.to(torch.float32) for v in values)
            assert torch.equal(hvd.allreduce(mine.to(dtype), op=hvd.Sum), total.to(dtype))
        mean = hvd.allreduce(mine.float())
        assert torch.equal(mean, sum(v.float() for v in values) / len(active))
        assert torch.equal(hvd.allreduce(mine, op=hvd.Min), values[0])
        assert torch.equal(hvd.allreduce(-mine.float(), op=hvd.Max), -values[0].float())
        if count < 10:
            assert torch.equal(hvd.allreduce(mine.double(), op=hvd.Product), torch.stack(values).double().prod(0))
        gathered = hvd.allgather(mine)
        assert torch.equal(gathered, torch.cat(values))
        root = size - 1
        assert torch.equal(hvd.broadcast(mine, root), torch.arange(count).remainder(7).add(root + 1))
        whole = torch.stack(values).sum(0)
        rows = [count // size + (1 if r < count % size else 0) for r in range(size)]
        part = hvd.reducescatter(mine, op=hvd.Sum)
        assert torch.equal(part, whole[sum(rows[:rank]) : sum(rows[: rank + 1])])
        received, counts = hvd.alltoall(torch.full((size * 2,), rank), splits=[2] * size)
        assert received.tolist() == [r for r in active for _ in range(2)]
        assert counts.tolist() == [2 if r in active else 0 for r in range(size)]
        sparse = torch.sparse_coo_tensor([[rank, 0]], [1.0, 1.0], (size,))
        result = hvd.synchronize(hvd.sparse_allreduce_async(sparse, f"s{step}")).to_dense()
        assert torch.allclose(result[0], torch.tensor(1.0 + (1.0 / len(active) if 0 in active else 0.0)))
        same = hvd.allreduce(torch.full((count,), 2.0), op=hvd.Adasum)
        assert torch.allclose(same, torch.full((count,), 2.0)), same[:4]
        norm = hvd.SyncBatchNorm(1, momentum=1.0)
        norm(torch.full((rank + 2, 1), float(rank)))
        mean = sum(r * (r + 2) for r in active) / sum(r + 2 for r in active)
        assert torch.allclose(norm.running_mean, torch.tensor([mean])), (norm.running_mean, mean)
        hvd.barrier()
        handles = [hvd.allreduce_async(torch.ones(5), op=hvd.Sum, name=f"{step}.{i}") for i in range(4)]
        assert all(hvd.synchronize(h).tolist() == [len(active)] * 5 for h in handles)
        if size > 1 and step == steps_of(rank) - 1 == size and len(active) == 1:
            try:
                hvd.broadcast(torch.ones(2), 0)
                raise RuntimeError("a rank that has joined was the root")
            except hvd.HorovodInternalError as error:
                assert "rank 0 (host" in str(error), error
    last = hvd.join()
    assert last == size - 1, last

# Training on uneven data: the gradients are averaged over the ranks that still have some.
torch.manual_seed(0)
model = torch.nn.Linear(2, 1, bias=False)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters())
want = model.weight.detach().clone()
for step in range(steps_of(size - 1)):
    active = [r for r in range(size) if steps_of(r) > step]
    want -= 0.1 * torch.full((1, 2), sum(r + 1.0 for r in active) / len(active))
    if rank in active:
        optimizer.zero_grad()
        model(torch.full((1, 2), rank + 1.0)).sum().backward()
        optimizer.step()
last = hvd.join()
hvd.broadcast_parameters(model.state_dict(), root_rank=last)
assert torch.allclose(model.weight, want, atol=1e-5), (model.weight, want)
# A rank without data makes its first step when the others have made theirs: all agree anew on how gradients go.
model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 1, bias=False))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for epoch in range(2):
    for _ in range(2 if rank or epoch else 0):
        optimizer.zero_grad()
        model(torch.full((1, 2), rank + 1.0)).sum().backward()
        optimizer.step()
    root = hvd.join()
    if epoch == 0:
        hvd.broadcast_parameters(model.state_dict(), root)
assert hvd.allgather_object([p.tolist() for p in model.parameters()]) == size * [[p.tolist() for p in model.parameters()]]
common.report(done=True, last=last)
hvd.shutdown()
