"""Corners of Horovod's interface that its programs rely on."""
# ruff: noqa: PT017 - worker scripts run without pytest

import os
import sys
import warnings

import common

try:
    import collective_core.torch as hvd

    assert hvd.mpi_ops.allreduce is hvd.allreduce, "without an import of its own"
    hvd.size()
    raise RuntimeError("there is no job yet")
except ValueError as error:
    assert "init()" in str(error), error

import numpy as np
import torch
from collective_core.torch import mpi_ops
from collective_core.torch.mpi_ops import Average, allreduce_async_, rank, size, synchronize
from torch import nn

hvd.init()
me, n = rank(), size()
assert mpi_ops.allreduce is hvd.allreduce

# A handle of a sparse allreduce is called for its result; an alltoall without splits tells them all the same.
mine = torch.eye(3)[me % 3].to_sparse()
whole = sum(torch.eye(3)[r % 3] for r in range(n))
assert torch.equal(hvd.sparse_allreduce_async(mine, "called", hvd.Sum)().to_dense(), whole)
assert torch.equal(synchronize(hvd.sparse_allreduce_async(mine, "synchronized", hvd.Sum)).to_dense(), whole)
# Half types are summed in float32: of a rank's own values with one index, and of the ranks', whose sum would overflow.
halves = torch.sparse_coo_tensor([[0, 0, 0, 1]], torch.tensor([2048.0, 1.0, 1.0, 60_000.0], dtype=torch.float16), (3,))
assert hvd.sparse_allreduce_async(halves, "halves")().to_dense().equal(torch.tensor([2050.0, 60_000.0, 0.0], dtype=torch.float16))
received, rows = synchronize(hvd.alltoall_async(torch.full((2 * n,), float(me))))
assert received.tolist() == [float(r) for r in range(n) for _ in range(2)]
assert rows.tolist() == [2] * n
handle = allreduce_async_(torch.ones(1), op=Average)
synchronize(handle)
assert synchronize(handle) is None

# More than eight dimensions: all of them count for the rows, and for the agreement.
x = (torch.arange(6.0 * n) + 100 * me).view(n, 1, 1, 1, 1, 1, 1, 1, 2, 3)
assert torch.equal(hvd.alltoall(x).view(n, 6), torch.stack([torch.arange(6.0) + 6 * me + 100 * r for r in range(n)]))
assert hvd.allgather(x).shape == (n * n, 1, 1, 1, 1, 1, 1, 1, 2, 3)
if n > 1:
    for call in (hvd.allreduce, hvd.allgather):
        try:
            call(torch.ones(1, 1, 1, 1, 1, 1, 1, 1, *((2, 3) if me == 0 else (3, 2))))
            raise RuntimeError("different shapes were accepted")
        except hvd.HorovodInternalError as error:
            assert error.kind == "mismatch", error

# Parameters as a plain list; objects that only cloudpickle can send.
model = nn.Linear(2, 2)
nn.init.constant_(model.weight, float(me))
hvd.broadcast_parameters(list(model.parameters()), 0)
assert (model.weight == 0).all()
try:
    import cloudpickle  # noqa: F401

    assert hvd.broadcast_object(lambda: me if me == 0 else -1, 0)() == 0
except ImportError:
    common.report(without="cloudpickle")

# After a broadcast of an optimizer without a state its gradients are there, where there are to be any.
taught, fixed = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2, dtype=torch.int32), requires_grad=False)
for kind, is_sparse in ((torch.optim.SGD, False), (torch.optim.SparseAdam, True)):
    taught.grad = None
    hvd.broadcast_optimizer_state(kind([taught, fixed], lr=0.1), 0)
    assert taught.grad.is_sparse == is_sparse
    assert torch.equal(hvd.broadcast(taught.grad.to_dense(), 0), torch.zeros(4))
    assert fixed.grad is None

# groups and num_groups together: a warning, as it should not have been an error.
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), groups=1, num_groups=2)
assert any("num_groups is ignored" in str(warning.message) and warning.filename == __file__ for warning in caught)

# What programs look up of an optimizer, also with Adasum; the exception without a sentence.
for op in (hvd.Average, hvd.Adasum):
    asked = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=op, backward_passes_per_step=2)
    assert (asked.backward_passes_per_step, asked.process_set) == (2, hvd.global_process_set)
    asked.set_backward_passes_per_step(3)
    assert asked.backward_passes_per_step == 3
    asked.backward_passes_per_step = 2
    asked.zero_grad()
    assert asked.backward_passes_per_step == 2
    assert asked._compression is hvd.Compression.none
plain = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), gradient_predivide_factor=2.0, sparse_as_dense=True)
assert (plain.op, plain.gradient_predivide_factor, plain.sparse_as_dense) == (hvd.Average, 2.0, True)
assert [*plain._parameter_names] == [*model.parameters()]
assert len({*plain._parameter_names.values()}) == 2
try:
    raise hvd.HorovodInternalError
except hvd.HorovodInternalError as error:
    assert (str(error), error.kind) == ("", "internal")

# Gradients of a SyncBatchNorm have the types of their parameters, whatever the input's.
norm = hvd.SyncBatchNorm(2)
norm(torch.randn(4, 2, dtype=torch.bfloat16)).sum().backward()
assert norm.weight.grad.dtype == norm.bias.grad.dtype == torch.float32

# Tiny numbers count in every thread, also when the program's own flushes them.
torch.set_flush_denormal(True)
tiny = np.full(4, 65537, dtype=np.int32)  # as float32: far below the smallest normal number
for count in (4, 200_000):
    x = torch.from_numpy(np.resize(tiny, count)).view(torch.float32)
    for got in (hvd.allreduce(x, op=hvd.Sum), synchronize(hvd.allreduce_async(x, op=hvd.Sum))):
        assert (got.view(torch.int32) == 65537 * n).all(), got.view(torch.int32)[:4]
torch.set_flush_denormal(False)

# Data loaders whose workers are forked after init, as PyTorch's are unless told otherwise: two epochs, with collectives while they live.
loader = torch.utils.data.DataLoader(range(24), batch_size=4, num_workers=2, multiprocessing_context="fork")
for _ in range(2):
    sums = [hvd.allreduce(batch.sum() + me, op=hvd.Sum).item() for batch in loader]
    assert sums == [n * sum(range(begin, begin + 4)) + sum(range(n)) for begin in range(0, 24, 4)], sums

# After a shutdown, a forked child neither joins the job again nor ends MPI for its parent.
hvd.barrier()
hvd.shutdown()
sys.stdout.flush()
child = os.fork()
if child == 0:
    try:
        hvd.init()
        os._exit(1)
    except hvd.HorovodInternalError as error:
        assert "spawn or forkserver" in str(error), error
    sys.exit(0)  # runs the handlers of exit
assert os.waitpid(child, 0)[1] == 0
hvd.init()
assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == n
common.report(done=True)
hvd.shutdown()
