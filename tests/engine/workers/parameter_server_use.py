"""Two workers and a server: options as schedulers make them, uneven steps, many pushes without a pull, use after the end, other options
after it.

Argument: a folder for snapshots.
"""

import os
import sys

os.environ["COLLECTIVE_SERVERS"] = "1"

import collective_core.torch as hvd
import common
import numpy as np
import torch
from collective_core.errors import CollectiveError
from collective_core.extensions.ps import client, group
from collective_core.extensions.ps.store import Store
from collective_core.runtime import point_to_point
from torch import nn

SGD, FREE = torch.optim.SGD, {"lr": 1.0, "staleness": None}
PUSHES, LENGTH = 50, 50_000
folder = sys.argv[1]
hvd.init()
torch.set_num_threads(1)


def check_options():
    """A learning rate that is a tensor, and one of NumPy: of dense parameters, and of a table that has none of its own."""
    for lr, scheduled in ((torch.tensor(0.5), 1.0), (0.5, np.float32(0.5))):
        model = nn.Sequential(hvd.ps.Embedding(3, 2, hvd.nn.SGD(), scale=0.0), nn.Linear(2, 1, bias=False))
        nn.init.ones_(model[1].weight)
        optimizer = hvd.ps.DistributedOptimizer(SGD(model[1].parameters(), lr=lr), model)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _, by=scheduled: by)
        model(torch.tensor([1])).sum().backward()
        optimizer.step()
        assert torch.equal(model[0].gather_weight()[1], torch.full((2,), -0.5 * float(scheduled)))
    array = hvd.ps.Array("of options", torch.zeros(3), SGD, **FREE)
    common.expect(lambda: client.client().ask({0: client.Request({"kind": "sync", "of": object()})}), TypeError, "not JSON serializable")
    assert torch.equal(array.pull(), torch.zeros(3)), "nothing waits for an answer to what was never sent"


def check_many_pushes(array):
    """No more than so many bytes are under way."""
    most, client.MAX_UNDER_WAY = client.MAX_UNDER_WAY, 10 * 4 * LENGTH
    for _ in range(PUSHES):
        array.push(torch.ones(LENGTH))
        assert client.client()._under_way[0] <= client.MAX_UNDER_WAY
    client.MAX_UNDER_WAY = most
    for _ in range(PUSHES):
        array.push(torch.ones(LENGTH))


def check_closed(uses):
    for use in uses:
        common.expect(use, CollectiveError, "has closed what")


if hvd.ps.is_server():
    counts = {}
    update = Store.update

    def count(self, name, contributions):
        update(self, name, contributions)
        counts[name] = counts.get(name, 0) + 1

    Store.update = count
    hvd.ps.serve(folder)
    assert counts["many"] == 2 * 2 * PUSHES, counts
    hvd.ps.serve(folder)
    hvd.shutdown()
    hvd.init()
else:
    me, workers = hvd.ps.workers().rank(), hvd.ps.workers()
    check_options()
    model = nn.Sequential(hvd.ps.Embedding(3, 2, hvd.nn.SGD(1.0)), nn.Linear(2, 1))
    optimizer = hvd.ps.DistributedOptimizer(SGD(model.parameters(), lr=0.1), model)
    array = hvd.ps.Array("kept", torch.zeros(3), SGD, lr=1.0, momentum=0.5)
    table = hvd.ps.Table("kept rows", 5, 2, hvd.nn.SGD(1.0), scale=0.0)
    ids = torch.tensor([3])
    array.push(torch.ones(3))
    table.push(ids, torch.ones(1, 2))
    many = hvd.ps.Array("many", torch.zeros(LENGTH), SGD, **FREE)
    for _ in range(2 + 3 * me):
        optimizer.step()
    check_many_pushes(many)
    point_to_point.LAST_WORDS = 0.0  # it does not wait for messages that are still to go
    hvd.ps.close()
    assert hvd.allreduce(torch.tensor([float(me)]), op=hvd.Sum, process_set=hvd.ps.workers()) == 1, "with fewer steps on one of them"
    assert group.current() is None, "it has not joined the servers again"
    check_closed((optimizer.step, optimizer.pull, array.pull, lambda: array.push(torch.ones(3)), lambda: table.pull(ids)))
    check_closed((lambda: table.push(ids, torch.ones(1, 2)), lambda: model(torch.tensor([1]))))
    # Training goes on with other learning rates.
    array = hvd.ps.Array("kept", torch.zeros(3), SGD, lr=0.25, momentum=0.5)
    table = hvd.ps.Table("kept rows", 5, 2, hvd.nn.SGD(0.25), scale=0.0)
    array.push(torch.zeros(3))
    table.push(ids, torch.ones(1, 2))
    assert torch.equal(array.pull(), torch.full((3,), -1.0 - 0.25 * 0.5)), array.pull()
    assert torch.equal(table.pull(ids), torch.full((1, 2), -1.25)), table.pull(ids)
    for other in ({"lr": 0.25, "momentum": 0.5, "staleness": 1}, {"lr": 0.125, "momentum": 0.5}):
        common.expect(lambda other=other: hvd.ps.Array("kept", torch.zeros(3), SGD, **other), CollectiveError, "in another way")
    common.expect(lambda: hvd.ps.Array("many", torch.zeros(LENGTH), SGD, lr=1.0), CollectiveError, "staleness 0, not None")
    hvd.shutdown()
    hvd.init()
    common.expect(array.pull, CollectiveError, "has closed what")
    common.report(done=True)
