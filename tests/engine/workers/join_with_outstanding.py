"""Joining with asynchronous operations of one's own outstanding: one case, then random programs against a model. argv: how many.

Of operation i of a program, every rank has it, or is without it and joins. A rank waits only for operations that come before the first
one that it is without, in an order that cannot deadlock, so every program has one result: what the ranks that have the operation put in.
"""

import random
import sys
import time

import collective_core.torch as hvd
import common
import torch

KINDS = ("sum", "average", "max", "group", "allgather", "broadcast", "reducescatter", "alltoall", "sparse")
hvd.init()
rank, size = hvd.rank(), hvd.size()


def one_rank_joins_early():
    count = 100_000
    if rank == 0:
        outstanding = hvd.allreduce_async(torch.ones(3), name="a", op=hvd.Sum)
        last = hvd.join()
        assert hvd.synchronize(outstanding).tolist() == [size] * 3
    else:
        time.sleep(0.5)
        assert torch.equal(hvd.allreduce(torch.ones(count), name="b", op=hvd.Sum), torch.full((count,), size - 1.0))
        assert hvd.allreduce(torch.ones(3), name="a", op=hvd.Sum).tolist() == [size] * 3
        last = hvd.join()
    assert hvd.allgather_object(last) == [last] * size


def data(kind, number, length, of):
    base = torch.arange(length).remainder(5) + 10 * of + number % 7
    if kind == "alltoall":
        return torch.stack((base[:size], base[-size:]), 1)
    return base.to(torch.bfloat16 if number % 3 == 0 else torch.float32)


def start(kind, number, length, root):
    name, mine = f"{kind} {number}", data(kind, number, length, rank)
    if kind in ("sum", "average", "max"):
        return hvd.allreduce_async(mine, name=name, op={"sum": hvd.Sum, "average": hvd.Average, "max": hvd.Max}[kind])
    if kind == "group":
        return hvd.grouped_allreduce_async([mine[:2].clone(), mine[2:4].clone(), mine], name=name, op=hvd.Sum)
    if kind == "allgather":
        return hvd.allgather_async(mine[: rank + 1].clone(), name=name)
    if kind == "broadcast":
        return hvd.broadcast_async(mine, root, name=name)
    if kind == "reducescatter":
        return hvd.reducescatter_async(mine, name=name, op=hvd.Sum)
    if kind == "alltoall":
        return hvd.alltoall_async(mine, [1] * size, name=name)
    return hvd.sparse_allreduce_async(torch.sparse_coo_tensor([[rank, size]], mine[:2].float(), (size + 1,)), name, hvd.Sum)


def expected(kind, number, length, root, who):
    parts = [data(kind, number, length, r) for r in who]
    if kind in ("sum", "average", "group", "reducescatter"):
        total = sum(part.float() for part in parts)
        whole = (total / len(who) if kind == "average" else total).to(parts[0].dtype)
        if kind == "reducescatter":
            return [whole.tensor_split(size)[rank]]
        return [whole[:2], whole[2:4], whole] if kind == "group" else [whole]
    if kind == "max":
        return [torch.stack(parts).amax(0)]
    if kind == "allgather":
        return [torch.cat([part[: r + 1] for part, r in zip(parts, who, strict=True)])]
    if kind == "broadcast":
        return [data(kind, number, length, root)]
    if kind == "alltoall":
        return [torch.stack([part[rank] for part in parts])]
    result = torch.zeros(size + 1)
    for part, r in zip(parts, who, strict=True):
        result[r] += part[0].float()
        result[size] += part[1].float()
    return [result]


def matches(kind, result, want):
    if kind == "alltoall":
        result = result[0]
    elif kind == "sparse":
        result = result.to_dense()
    got = result if isinstance(result, (list, tuple)) else [result]
    return len(got) == len(want) and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def program(seed):
    shared = random.Random(seed)  # the same on all ranks
    operations = shared.randrange(3, 9)
    certain = [shared.randrange(operations + 1) for _ in range(size)]  # a rank waits only for operations before this one
    has = [{i for i in range(operations) if i < certain[r] or shared.random() < 0.4} for r in range(size)]
    kinds = [shared.choice(KINDS) for _ in range(operations)]
    lengths = [shared.choice((2 * size, 70, 60_000)) for _ in range(operations)]
    roots = [max(range(size), key=lambda r: (i in has[r], certain[r])) for i in range(operations)]
    own = random.Random(seed * 100 + rank)
    open_, results = {}, {}
    todo = sorted(has[rank], key=lambda i: i + own.uniform(0, 4))

    def submit(i):
        if i not in open_ and i not in results:
            open_[i] = start(kinds[i], seed * 100 + i, lengths[i], roots[i])

    for i in todo:
        submit(i)
        if own.random() < 0.2:
            time.sleep(own.uniform(0, 0.02))
        if i < certain[rank] and own.random() < 0.5:
            for before in range(i):
                submit(before)
            results[i] = hvd.synchronize(open_.pop(i))
    last = hvd.join()
    for i, handle in open_.items():
        results[i] = hvd.synchronize(handle)
    for i, result in results.items():
        who = [r for r in range(size) if i in has[r]]
        want = expected(kinds[i], seed * 100 + i, lengths[i], roots[i], who)
        assert matches(kinds[i], result, want), (seed, kinds[i], i, who, result, want)
    assert hvd.allgather_object(last) == [last] * size, "the ranks differ in who joined last"


one_rank_joins_early()
for seed in range(int(sys.argv[1])):
    program(seed)
common.report(done=True)
hvd.shutdown()
