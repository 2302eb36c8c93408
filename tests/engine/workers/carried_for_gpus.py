"""What the engine does with tensors in the memory of a GPU, without one: a stand-in for NCCL, with MPI under it, on host memory.

The engine must never touch such memory. So the addresses that it gets here are made up, and only the stand-in knows what they mean.
"""

import common
import numpy as np
from mpi4py import MPI

import collective_core as cc
from collective_core import _native

cc.init()
rank, size = cc.rank(), cc.size()
memory: dict[int, np.ndarray] = {}
started = []


def start(transfer, error, capacity):
    asked = transfer.contents
    started.append((asked.kind, asked.reduce, asked.contributors, asked.count))
    if asked.kind == _native.ALLREDUCE:
        mine = memory[asked.input] if asked.input else np.zeros(asked.count, dtype=np.float32)
        total = np.empty_like(mine)
        MPI.COMM_WORLD.Allreduce(mine, total)
        if asked.output:
            memory[asked.output][:] = total / asked.contributors if asked.reduce == _native.AVERAGE else total
    else:
        MPI.COMM_WORLD.Bcast([memory[asked.output], MPI.BYTE], asked.root)
    return 0


questions = 0


def test(process_set, error, capacity):
    global questions
    questions += 1
    return questions % 3 == 0  # now and then not yet


_native.use_carrier(start, test, device=_native.GPU_MEMORY)


def on_gpu(kind, name, array, at, **more):
    memory[at] = array
    return _native.operation(kind, name, "float32", array.shape, array.size, at, at, device=_native.GPU_MEMORY, **more)


def problem_of(operation):
    try:
        _native.run(operation)
    except cc.CollectiveError as error:
        return f"{error.kind}: {error}"
    return "none"


for count in (1, 5, 100_000):
    array = np.full(count, 1.0 + rank, dtype=np.float32)
    _native.run(on_gpu(_native.ALLREDUCE, f"sum {count}", array, 0x1000 + count))
    assert (array == size * (size + 1) / 2).all()
    array[:] = rank
    _native.run(on_gpu(_native.BROADCAST, f"broadcast {count}", array, 0x1000 + count, root=size - 1))
    assert (array == size - 1).all()
assert len(started) == 6, started

# Other ranks' wishes differ, one has its tensor elsewhere: errors on all, and nothing was started.
for different in ("shape", "device"):
    array = np.ones(10 + (rank if different == "shape" else 0), dtype=np.float32)
    asked = on_gpu(_native.ALLREDUCE, f"odd {different}", array, 0x1000)
    if different == "device" and rank == 0:
        asked = _native.operation(_native.ALLREDUCE, f"odd {different}", "float32", (10,), 10, array.ctypes.data, array.ctypes.data)
    said = problem_of(asked)
    assert said.startswith("mismatch"), said
    assert "on a GPU" in said
assert len(started) == 6, started

# A rank that has joined is called without memory, and an average does not count it.
if rank > 0:
    array = np.full(1000, 6.0, dtype=np.float32)
    _native.run(on_gpu(_native.ALLREDUCE, "without rank 0", array, 0x1000, reduce=_native.AVERAGE))
    assert (array == 6.0).all()
cc.join()
assert started[-1] == (_native.ALLREDUCE, _native.AVERAGE, size - 1, 1000), started[-1]

said = problem_of(_native.operation(_native.REDUCESCATTER, "no", "float32", (4,), 4, 0x1000, 0x2000, device=_native.GPU_MEMORY))
assert said.startswith("invalid"), "the engine would have touched the memory"
common.report(done=True)
