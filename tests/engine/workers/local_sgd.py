"""LocalSGD and DiLoCo against one process that does what all ranks do; state, errors, and the plan of communication."""
# ruff: noqa: PT017 - worker scripts run without pytest

import copy
import hashlib

import collective_core.torch as hvd
import common
import torch
from torch import nn

hvd.init()
rank, size = hvd.rank(), hvd.size()
STEPS = 24


def make(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 3))


def data(step, of_rank):
    generator = torch.Generator().manual_seed(100 * step + of_rank)
    x = torch.randn(8, 6, generator=generator)
    return x, x[:, :3].argmax(1)


def learn(model, optimizer, step, of_rank):
    x, y = data(step, of_rank)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


def digest(tensors):
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()


def agree(model):
    return len(set(hvd.allgather_object(digest(model.parameters())))) == 1


def by_one_process(sync_every, fragments, delay, alpha, steps=STEPS):
    """The papers' algorithm for all ranks at once; the outer parameters. ``fragments``: lists of the parameters' numbers."""
    models = [make() for _ in range(size)]
    inner = [adam(model) for model in models]
    outer = [nn.Parameter(p.detach().clone()) for p in models[0].parameters()]
    optimizer = torch.optim.SGD(outer, lr=0.7, momentum=0.9, nesterov=True)
    under_way = []
    for step in range(1, steps + 1):
        for r in range(size):
            learn(models[r], inner[r], step, r)
        with torch.no_grad():
            for n, fragment in enumerate(fragments):
                if step % sync_every == (n + 1) * sync_every // len(fragments) % sync_every:
                    deltas = [sum(outer[i] - list(m.parameters())[i] for m in models) / size for i in fragment]
                    under_way.append((step + delay, fragment, deltas))
            for _, fragment, deltas in [each for each in under_way if each[0] == step]:
                optimizer.zero_grad()
                for i, delta in zip(fragment, deltas, strict=False):
                    outer[i].grad = delta
                optimizer.step()
                for m in models:
                    for i in fragment:
                        own = list(m.parameters())[i]
                        own.copy_((1 - alpha) * outer[i] + alpha * own)
    return outer, models


# LocalSGD at every step is the ordinary optimizer, where that is linear in the gradient.
reference, model = make(), make()
plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.0)
ordinary = hvd.DistributedOptimizer(plain, named_parameters=reference.named_parameters())
local = hvd.LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), sync_every=1)
for step in range(6):
    learn(reference, ordinary, step, rank)
    learn(model, local, step, rank)
    assert agree(model)
for want, got in zip(reference.parameters(), model.parameters(), strict=False):
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)

# Each rank by itself between synchronisations; then all have the same.
model = make()
local = hvd.LocalSGD(model, adam(model), sync_every=4)
for step in range(1, 9):
    learn(model, local, step, rank)
    assert agree(model) == (step % 4 == 0 or size == 1), step

PARTS = [[0, 1], [2, 3, 4, 5]]
for fragments, delay, alpha in (([[0, 1, 2, 3, 4, 5]], 0, 0.0), (PARTS, 0, 0.0), (PARTS, 3, 0.5), ([[0, 1, 2, 3, 4, 5]], 2, 0.25)):
    model = make()
    parts = [[list(model.parameters())[i] for i in part] for part in fragments]
    diloco = hvd.DiLoCo(model, adam(model), sync_every=8, fragments=parts, delay=delay, alpha=alpha)
    for step in range(1, STEPS + 1):
        learn(model, diloco, step, rank)
    outer, models = by_one_process(8, fragments, delay, alpha)
    found = {id(p): o for fragment in diloco._fragments for p, o in zip(fragment.parameters, fragment.outer, strict=False)}
    for p, want, mine in zip(model.parameters(), outer, models[rank].parameters(), strict=False):
        torch.testing.assert_close(found[id(p)], want.detach(), rtol=1e-4, atol=1e-5, msg=f"outer, {fragments} {delay}")
        torch.testing.assert_close(p, mine, rtol=1e-4, atol=1e-5, msg=f"own, {fragments} {delay}")
    assert digest(found.values()) == hvd.broadcast_object(digest(found.values()), 0), "the outer parameters differ"
    diloco.synchronize()
    assert agree(model)

# Few bits: the same on all ranks, about what float32 learns, and a part of the bytes.
losses, sent = {}, {}
for bits in (32, 8, 4):
    model = make()
    diloco = hvd.DiLoCo(model, adam(model), sync_every=8, fragments=2, delay=4, bits=bits)
    before = sum(row["bytes"] for row in hvd.metrics()["operations"] if row["kind"] in ("allreduce", "allgather", "alltoall"))
    for step in range(1, 97):
        learn(model, diloco, step, rank)
    after = sum(row["bytes"] for row in hvd.metrics()["operations"] if row["kind"] in ("allreduce", "allgather", "alltoall"))
    sent[bits] = after - before
    diloco.synchronize()
    assert agree(model), bits
    with torch.no_grad():
        pairs = [data(1000 + n, n) for n in range(40)]
        losses[bits] = sum(float(nn.functional.cross_entropy(model(x), y)) for x, y in pairs) / len(pairs)
        start = sum(float(nn.functional.cross_entropy(make()(x), y)) for x, y in pairs) / len(pairs)
    assert losses[bits] < 0.6 * start, (losses, start)
assert losses[8] < 1.05 * losses[32], losses
assert losses[4] < 1.1 * losses[32], losses
assert sent[8] < 0.6 * sent[32], sent  # small fragments: parts are rounded up to blocks
assert sent[4] < 0.7 * sent[8], sent

# A state, in the middle of a round, from which others go on as this one does; the sums under way are not in it.
model = make()
diloco = hvd.DiLoCo(model, adam(model), sync_every=6, fragments=2, bits=8)
for step in range(1, 9):
    learn(model, diloco, step, rank)
state = copy.deepcopy(diloco.state_dict())
again = make(seed=7)
other = hvd.DiLoCo(again, adam(again), sync_every=6, fragments=2, bits=8)
other.load_state_dict(state)
for step in range(9, 20):
    learn(model, diloco, step, rank)
    learn(again, other, step, rank)
assert digest(again.parameters()) == digest(model.parameters())
foreign = hvd.broadcast_object(state, 0)
other.load_state_dict(foreign)
assert all((fragment.residual is not None) == (rank == 0) for fragment in other._fragments)

# A GradScaler that leaves a step out on one rank holds up nobody.
scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
model = make()
diloco = hvd.DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), sync_every=2)
for step in range(1, 5):
    x, y = data(step, rank)
    diloco.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y) * (float("inf") if step == 1 and rank == size - 1 else 1.0)
    scaler.scale(loss).backward()
    scaler.step(diloco.inner)
    scaler.update()
    diloco.count_step()
assert agree(model)
assert all(torch.isfinite(p).all() for p in model.parameters())

model = make()
for wrong in (
    lambda: hvd.DiLoCo(model, adam(model), sync_every=0),
    lambda: hvd.DiLoCo(model, adam(model), sync_every=4, delay=4),
    lambda: hvd.DiLoCo(model, adam(model), sync_every=4, fragments=5),
    lambda: hvd.DiLoCo(model, adam(model), sync_every=9, fragments=7),
    lambda: hvd.DiLoCo(model, adam(model), sync_every=4, bits=2),
    lambda: hvd.DiLoCo(model, adam(model), sync_every=4, fragments=[list(model.parameters())[1:]]),
    lambda: hvd.DiLoCo(model, adam(model), torch.optim.SGD(list(model.parameters())[1:], lr=0.1), sync_every=4),
    lambda: hvd.DiLoCo(model, adam(model), hvd.DistributedOptimizer(adam(model)), sync_every=4),
):
    try:
        wrong()
        raise RuntimeError("it was accepted")
    except ValueError:
        pass

if size > 1:
    model = make(seed=rank)
    diloco = hvd.DiLoCo(model, adam(model), sync_every=1)
    try:
        learn(model, diloco, 0, rank)
        raise RuntimeError("parameters that differ were accepted")
    except hvd.CollectiveError as error:
        assert "broadcast_parameters" in str(error), error

plan = hvd.plan_communication(model, sync_every=50)
assert hvd.allgather_object(plan.as_data()) == size * [plan.as_data()]
by_name = {choice.name.strip(): choice for choice in plan.choices}
whole = by_name["DistributedOptimizer"].bytes
assert by_name["LocalSGD, DiLoCo(sync_every=50)"].bytes * 50 == whole
assert whole == 2 * (size - 1) / size * 4 * sum(p.numel() for p in model.parameters())
common.report(losses=losses, plan=str(plan))
