"""Parameter servers beside one process with the same global batch, beside the ordinary optimizer, and what a worker may be ahead.

Argument: servers of the job, the last ranks.
"""

import os
import sys
import threading

os.environ["COLLECTIVE_SERVERS"] = sys.argv[1]

import collective_core.torch as hvd
import common
import torch
from collective_core.errors import CollectiveError
from torch import nn

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


def check_errors():
    """One clear error each, after which everything works."""
    me, workers = hvd.ps.workers().rank(), hvd.ps.workers()
    model = nn.Linear(3, 2)
    table = hvd.ps.Table("of errors", 5, 2, hvd.nn.SGD())
    array = hvd.ps.Array("array of errors", torch.zeros(3), torch.optim.SGD, lr=1.0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
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
    check_errors()
    hvd.ps.close()
# All ranks again.
assert hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Sum) == sum(range(hvd.size()))
common.report(done=True)
