"""Which way tensors on GPUs go (gpus_by_gloo.py), and that the way through host memory gives the same. argv: what is wrong, and where."""

import contextlib
import io
import sys
import warnings

import collective_core.torch as hvd
import common
import gpus_by_gloo
import numpy as np
import torch
from collective_core.runtime import membership
from collective_core.torch import gpu, nccl

case = sys.argv[1]
rank, size = common.RANK, common.SIZE
platform = gpus_by_gloo.use(problem="its PyTorch has no NCCL" if case == "missing" and rank == 1 else "")
if case == "shared":
    platform.gpu = "GPU-1"
elif case == "broken" and rank == 1:

    def broken(*_):
        raise RuntimeError("no socket is left")

    platform.backend = broken
if case == "versions":
    platform.version = lambda: (2, 28, rank)

copies = []
plain_host_memory = platform.host_memory
platform.host_memory = lambda like: (copies.append(like.numel()), plain_host_memory(like))[1]

hvd.init()
said = io.StringIO()
with warnings.catch_warnings(), contextlib.redirect_stderr(said):
    warnings.simplefilter("error")  # as python -W error, which must not end the call of one rank
    try:
        total, error = hvd.allreduce(torch.full((7,), rank + 1.0), op=hvd.Sum), ""
    except hvd.HorovodInternalError as failure:
        total, error = torch.full((7,), size * (size + 1) / 2.0), f"{failure.kind}: {failure}"
    if not error:
        hvd.allreduce(torch.ones(7))
assert (total == size * (size + 1) / 2).all()

if not error and not nccl.groups:
    # Through host memory: the same, also where another operation is submitted first and where nobody waits in this order.
    everyone = [np.arange(12, dtype=np.float32).reshape(4, 3) * (r + 1) for r in range(size)]
    mine = torch.from_numpy(everyone[rank].copy())
    handles = [hvd.allreduce_async(mine, name=f"a{number}", op=hvd.Sum) for number in range(3)]
    gathered = hvd.allgather_async(mine, name="g")
    flag = torch.tensor([float(rank)])
    platform.holds_all = False
    assert hvd.allreduce(flag, op=hvd.Max).item() == size - 1
    platform.holds_all = True
    assert np.array_equal(hvd.synchronize(gathered).numpy(), np.concatenate(everyone))
    for handle in reversed(handles):
        assert np.array_equal(hvd.synchronize(handle).numpy(), sum(everyone))
    assert np.array_equal(hvd.broadcast(mine, 1).numpy(), everyone[1])
    in_place = mine.t().clone().t()  # not contiguous
    hvd.broadcast_(in_place, 0)
    assert np.array_equal(in_place.numpy(), everyone[0])
    assert np.array_equal(hvd.reducescatter(mine, op=hvd.Sum).numpy(), np.array_split(sum(everyone), size)[rank])
    received, rows = hvd.alltoall(mine[:size], [1] * size)
    assert np.array_equal(received.numpy(), np.stack([theirs[rank] for theirs in everyone]))
    assert rows.tolist() == [1] * size
    assert torch.equal(mine, torch.from_numpy(everyone[rank])), "the input was changed"

    # A copy that takes its time: the engine is asked when it is there, and what waits for a result waits for it.
    class Late(gpus_by_gloo.Done):
        there = False

        def query(self):
            return self.there

        def synchronize(self):
            self.there = True

    plain_event, platform.event = platform.event, lambda _device: Late()
    first, second = (hvd.allreduce_async_(mine.clone(), name=f"late {number}", op=hvd.Sum) for number in range(2))
    assert len(gpu._copying) == 2
    assert not hvd.poll(first)
    assert np.array_equal(hvd.synchronize(second).numpy(), sum(everyone))
    assert np.array_equal(hvd.synchronize(first).numpy(), sum(everyone))
    hvd.allreduce_async(mine, name="nobody waits")
    hvd.elastic.TorchState(step=1).commit()
    assert not gpu._copying
    platform.event = plain_event

    # One copy for a bucket, whatever the number of its gradients.
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(5)))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    for _ in range(2):
        copies.clear()
        optimizer.zero_grad()
        model(torch.full((2, 4), 1.0 + rank)).sum().backward()
        optimizer.step()
    assert len(copies) == 1, copies
    assert copies[0] >= sum(p.numel() for p in model.parameters())

texts = [line for line in said.getvalue().splitlines() if "through host memory" in line]
assert len(texts) == (1 if rank == 0 and not error and not nccl.groups and membership.current().config.nccl == "auto" else 0), texts
common.report(error=error, warned=texts, enabled=None if error else hvd.nccl_enabled())
