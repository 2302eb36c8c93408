"""Parameter servers beside one process with the same global batch, beside the ordinary optimizer, and what a worker may be ahead.

Argument: servers of the job, the last ranks.
"""

import copy
import os
import sys
import threading
from unittest import mock

os.environ["COLLECTIVE_SERVERS"] = sys.argv[1]

import collective_core.torch as hvd
import common
import torch
from collective_core.errors import CollectiveError
from collective_core.extensions.ps import embedding
from collective_core.runtime import membership
from torch import nn

EARLY = hvd.ps.Embedding(5, 2, hvd.nn.SGD(1.0), scale=0.0)
hvd.init()
torch.set_num_threads(1)
SERVERS, ROWS, STEPS = int(sys.argv[1]), 23, 6
#: Powers of two: what is multiplied by them is not rounded.
LR = 0.125
assert hvd.ps.is_server() == (hvd.rank() >= hvd.size() - SERVERS)


def batch(step, of):
    """Ids with many duplicates, none on one worker in each second step, and inputs and targets."""
    generator = torch.Generator().manual_seed(100 * step + of)
    length = 0 if step % 2 and of == 1 else 4 + 3 * of
    ids = torch.randint(0, ROWS, (length, 3), generator=generator)
    ids[:, 0] = ids[:, 0] % 3
    return ids, torch.randn(8, 30, generator=generator, dtype=torch.float64)


class Model(nn.Module):
    """Dense layers, of which one is large enough to be cut, an embedding and a bag; ``make`` makes one of the last two."""

    def __init__(self, embedding, bag):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.bag = embedding, bag
        self.dense = nn.Sequential(nn.Linear(30, 200), nn.Tanh(), nn.Linear(200, 4)).double()
        self.head = nn.Linear(4, 1, dtype=torch.float32)

    def forward(self, ids, x):
        used = self.embedding(ids).square().sum() + (self.bag(ids) * torch.arange(4)).sum()
        return self.head(self.dense(x).float()).square().mean() + used


def check_trainings():
    """Every optimizer: dense parameters and rows as in one process; the ordinary optimizer's bits."""
    me, workers = hvd.ps.workers().rank(), hvd.ps.workers().size()
    cases = [
        (lambda p: torch.optim.SGD(p, lr=LR, momentum=0.5), hvd.nn.SGD(LR), lambda p: torch.optim.SGD(p, lr=LR)),
        (lambda p: torch.optim.Adam(p, lr=0.01), hvd.nn.Adam(0.01), lambda p: torch.optim.SparseAdam(p, lr=0.01)),
        (lambda p: torch.optim.AdamW(p, lr=0.01), hvd.nn.Adagrad(0.01), lambda p: torch.optim.Adagrad(p, lr=0.01)),
    ]
    for dense, of_rows, sparse in cases:
        tables = {"dtype": torch.float64, "scale": 1.0, "seed": 3}
        model = Model(hvd.ps.Embedding(ROWS, 4, of_rows, **tables), hvd.ps.EmbeddingBag(ROWS, 4, of_rows, mode="sum", **tables))
        if me:
            with torch.no_grad():
                model.dense[0].weight.zero_()  # rank 0's counts
        optimizer = hvd.ps.DistributedOptimizer(dense(model.parameters()), model, staleness=0)
        plain = [nn.Embedding(ROWS, 4, sparse=True).double(), nn.EmbeddingBag(ROWS, 4, mode="sum", sparse=True).double()]
        for ours, theirs in zip((model.embedding, model.bag), plain, strict=True):
            theirs.load_state_dict({"weight": ours.gather_weight()})
        alone, beside = Model(*plain), Model(nn.Embedding(1, 4), nn.EmbeddingBag(1, 4))
        of_dense = [p for name, p in alone.named_parameters() if not name.startswith(("embedding", "bag"))]
        alone_optimizers = [dense(of_dense), sparse([table.weight for table in plain])]
        same = [p for name, p in beside.named_parameters() if not name.startswith(("embedding", "bag"))]
        ordinary = hvd.DistributedOptimizer(dense(same), process_set=hvd.ps.workers())
        schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in (optimizer, alone_optimizers[0], ordinary)]
        for step in range(STEPS):
            ids, x = batch(step, me)
            optimizer.zero_grad()
            model(ids, x).backward()
            optimizer.step()
            for each in alone_optimizers:
                each.zero_grad()
            for worker in range(workers):
                (alone(*batch(step, worker)) / workers).backward()
            for each in alone_optimizers:
                each.step()
            ordinary.zero_grad()
            beside.head(beside.dense(x).float()).square().mean().backward()
            ordinary.step()
            for each in schedulers:
                each.step()
            mine = [p for p in model.parameters() if p.numel()]
            torch.testing.assert_close(mine, [p.detach() for p in of_dense], rtol=1e-6, atol=1e-7)
            assert all(torch.equal(a, b) for a, b in zip(mine, same, strict=True)), f"not the bits of the ordinary optimizer in step {step}"
        for ours, theirs in zip((model.embedding, model.bag), plain, strict=True):
            torch.testing.assert_close(ours.gather_weight(), theirs.weight.detach(), rtol=1e-12, atol=1e-12)


def check_low_level():
    """Pushes and pulls of arrays and of rows with duplicates."""
    me, workers = hvd.ps.workers().rank(), hvd.ps.workers().size()
    array = hvd.ps.Array("low", torch.full((3, 5), 4.0 + me), torch.optim.SGD, lr=LR)
    assert torch.equal(array.pull(), torch.full((3, 5), 4.0))
    array.push(torch.full((3, 5), float(me)))
    assert torch.equal(array.pull(), torch.full((3, 5), 4.0 - LR * (workers - 1) / 2))
    table = hvd.ps.Table("rows", 10, 2, hvd.nn.SGD(), scale=0.5, seed=1)
    ids = torch.tensor([9, 3, 3, 0], dtype=torch.int32)
    before = table.pull(ids)
    assert torch.equal(before[1], before[2])
    assert before.abs().max() <= 0.5
    table.push(ids if me == 0 else ids[:0], torch.ones(4, 2) if me == 0 else torch.ones(0, 2), lr=LR)
    assert torch.equal(table.pull(ids), before - LR / workers * torch.tensor([[1.0], [2.0], [2.0], [1.0]]))
    again = hvd.ps.Table("again", 10, 2, hvd.nn.SGD(LR), scale=0.5, seed=1)
    assert torch.equal(again.pull(ids), before), "initial values depend on row and seed alone"


def check_staleness():
    """What the first worker may do while another one does nothing, which waits in an operation of the workers."""
    me, workers = hvd.ps.workers().rank(), hvd.ps.workers()
    free = hvd.ps.Array("unbounded", torch.zeros(3), torch.optim.SGD, lr=1.0, staleness=None)
    bounded = hvd.ps.Array("bounded", torch.zeros(3), torch.optim.SGD, lr=1.0, staleness=2)
    if me == 0:
        for step in range(20):
            free.push(torch.ones(3))
            assert free.pull()[0] == -step - 1
        for step in range(2):
            bounded.push(torch.ones(3))
            assert bounded.pull()[0] == -step - 1
    hvd.barrier(process_set=workers)
    found = []
    if me == 0:  # a third step ahead: it ends when all others have made one
        bounded.push(torch.ones(3))
        waiting = threading.Thread(target=lambda: found.append(bounded.pull()))
        waiting.start()
    hvd.barrier(process_set=workers)
    if me:
        bounded.push(torch.full((3,), 100.0))
    else:
        waiting.join()
        assert found[0][0] == -3 - 100 * (workers.size() - 1), found
    hvd.barrier(process_set=workers)
    assert bounded.pull()[0] == -3 - 100 * (workers.size() - 1)


def check_what_programs_do():
    """Gradients zeroed between forward and backward, options loaded, a copied model, frozen parameters, lookups without backward."""
    me = hvd.ps.workers().rank()
    ids = torch.tensor([1, 2])
    model = nn.Sequential(EARLY, nn.Linear(2, 2), hvd.ps.Embedding(5, 2, hvd.nn.SGD(1.0), scale=0.0, dtype=torch.float64))
    model[1].bias.requires_grad_(False)
    with torch.no_grad():
        model[1].bias.fill_(7.0 + me)
        model[1].weight.copy_(torch.eye(2))
    sgd = torch.optim.SGD([model[1].weight], lr=LR)
    optimizer = hvd.ps.DistributedOptimizer(sgd, model)
    assert torch.equal(model[1].bias, torch.full((2,), 7.0)), "rank 0's"
    assert model[0].name != model[2].name

    def rows():
        return [table.gather_weight()[:3, 0].tolist() for table in (model[0], model[2])]

    loss = model[1](model[0](ids)).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    assert rows() == [[0.0, -1.0, -1.0], [0.0, 0.0, 0.0]], rows()
    loss = model[2](ids).sum()
    loss.backward(retain_graph=True)
    optimizer.zero_grad()
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    assert rows() == [[0.0, -1.0, -1.0], [0.0, -2.0, -2.0]], rows()
    with mock.patch.object(embedding, "MAX_PASSES", 2):
        found = [model[0](ids) for _ in range(4)]
        found[0].sum().backward()
        found[1].sum().backward()
        common.expect(found[2].sum().backward, ValueError, "the gradients of 2 lookups wait for a step")
    optimizer.zero_grad()
    optimizer.step()
    assert rows() == [[0.0, -1.0, -1.0], [0.0, -2.0, -2.0]], rows()
    twin = copy.deepcopy(model)
    assert torch.equal(twin[0](ids), model[0](ids))
    optimizer.load_state_dict(optimizer.state_dict())
    sgd.param_groups[0]["lr"] = 0.0
    model[1](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert torch.equal(model[1].weight, twin[1].weight), "the learning rate is 0"
    sgd.param_groups[0]["lr"] = LR
    optimizer.step()
    assert torch.equal(model[1].weight, twin[1].weight - LR)


def check_errors():
    """One clear error each, after which everything works."""
    me, workers = hvd.ps.workers().rank(), hvd.ps.workers()
    model = nn.Linear(3, 2)
    table = hvd.ps.Table("of errors", 5, 2, hvd.nn.SGD())
    array = hvd.ps.Array("array of errors", torch.zeros(3), torch.optim.SGD, lr=1.0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    both = nn.ParameterDict({"a": torch.zeros(2, 3), "b": torch.zeros(3, 2)})
    sparse = nn.Sequential(hvd.ps.Embedding(3, 2, hvd.nn.SGD(0.1)), nn.Embedding(5, 2, sparse=True), nn.Linear(2, 2))
    sparse[2].requires_grad_(False)
    trained = [hvd.ps.DistributedOptimizer(torch.optim.SGD(each.parameters(), lr=0.1), each) for each in (both, sparse)]
    sparse[2].weight.requires_grad_(True)
    (sparse[2](torch.ones(2)).sum()).backward()

    def step_with_a_sparse_gradient():
        sparse[2].weight.grad = None
        sparse[1](torch.tensor([1])).sum().backward()
        trained[1].step()

    def make_in_another_order():
        name = trained[0]._blocks[0].array.name.split(".group")[0]
        with mock.patch.object(membership, "next_name", return_value=name):
            hvd.ps.DistributedOptimizer(torch.optim.SGD([both["b"], both["a"]], lr=0.1), both)

    with_state = torch.optim.SGD([nn.Parameter(torch.ones(1), requires_grad=False)], lr=0.1, momentum=0.5)
    with_state.param_groups[0]["params"][0].grad = torch.ones(1)
    with_state.step()
    for call, kind, message in (
        (lambda: hvd.ps.DistributedOptimizer(sgd, model, staleness=-1), ValueError, "staleness=-1"),
        (lambda: hvd.ps.DistributedOptimizer(torch.optim.LBFGS(model.parameters()), model), ValueError, "have these optimizers"),
        (lambda: hvd.ps.DistributedOptimizer(torch.optim.SGD(nn.Linear(2, 2).half().parameters()), model), ValueError, "float16"),
        (lambda: hvd.ps.Embedding(3, 2, torch.optim.SGD), TypeError, "one of hvd.nn's"),
        (lambda: hvd.ps.Embedding(3, 2, hvd.nn.SGD(0.1))(torch.tensor([1])), ValueError, "make hvd.ps.DistributedOptimizer"),
        (lambda: array.push(torch.zeros(4)), ValueError, r"has the shape \(3,\), and the gradient \(4,\)"),
        (lambda: table.pull(torch.tensor([5])), ValueError, "id 5 is out of range"),
        (lambda: table.push(torch.tensor([1]), torch.zeros(1, 3), lr=1.0), ValueError, "1 x 2, not"),
        (lambda: table.push(torch.tensor([1]), torch.zeros(1, 2)), ValueError, "a learning rate"),
        (lambda: hvd.ps.Array("of errors", torch.zeros(3), torch.optim.SGD, lr=1.0), CollectiveError, "in another way"),
        (lambda: hvd.ps.Table("of errors", 6, 2, hvd.nn.SGD()), CollectiveError, "rows 6, not 5"),
        (
            lambda: hvd.ps.Array("array of errors", torch.zeros(3, 1), torch.optim.SGD, lr=1.0),
            CollectiveError,
            r"shape \[3, 1\], not \[3\]",
        ),
        (make_in_another_order, CollectiveError, r"parameters b to a \(2; .*, not a to b \(2;"),
        (lambda: trained[0].add_param_group({"params": [nn.Parameter(torch.ones(1))]}), ValueError, "all its groups before"),
        (lambda: trained[0].load_state_dict(with_state.state_dict()), ValueError, "from snapshots"),
        (trained[1].step, ValueError, "2.weight has a gradient, but did not require"),
        (step_with_a_sparse_gradient, ValueError, "the gradient of 1.weight is sparse"),
        (lambda: array.push(torch.zeros(3).to_sparse()), ValueError, "gradients are dense"),
        (lambda: hvd.ps.DistributedOptimizer(sgd, sparse), ValueError, "the embedding 0 has a hvd.ps.DistributedOptimizer already"),
        (hvd.ps.serve, CollectiveError, "this rank is a worker"),
        (lambda: hvd.allreduce(torch.ones(1)), CollectiveError, r"process_set=hvd.ps.workers\(\)"),
        (lambda: hvd.broadcast_object(1), CollectiveError, r"process_set=hvd.ps.workers\(\)"),
        (lambda: hvd.add_process_set([0]), CollectiveError, r"process_set=hvd.ps.workers\(\)"),
    ):
        common.expect(call, kind, message)
    assert hvd.allreduce(torch.tensor([float(me)]), op=hvd.Sum, process_set=workers) == sum(range(workers.size()))
    assert torch.equal(array.pull(), torch.zeros(3))


if hvd.ps.is_server():
    common.expect(hvd.ps.workers, CollectiveError, "this rank is a parameter server")
    common.expect(lambda: hvd.ps.serve(snapshot_every=0), CollectiveError, "snapshot_every=0")
    if SERVERS == 1:
        common.expect(lambda: hvd.ps.serve(replicate=True), CollectiveError, "needs another server")
    hvd.ps.serve(replicate=SERVERS > 1)
else:
    check_trainings()
    check_low_level()
    check_staleness()
    check_what_programs_do()
    check_errors()
    hvd.ps.close()
# All ranks again.
assert hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Sum) == sum(range(hvd.size()))
common.report(done=True)
