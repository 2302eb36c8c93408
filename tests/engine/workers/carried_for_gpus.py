"""What the engine does with tensors in the memory of a GPU, without one: a stand-in for NCCL, with MPI under it, on host memory.

The engine must never touch such memory. So the addresses that it gets here are made up, and only the stand-in knows what they mean.
"""

import common
import numpy as np
from collective_core.transport import nccl_calls
from nccl_by_mpi import Library

import collective_core as cc
from collective_core import _native

cc.init()
rank, size = cc.rank(), cc.size()
library = Library({size: range(size)})
library.communicator(size, b"", rank)
memory: dict[int, np.ndarray] = {}
received: dict[int, np.ndarray] = {}  # by tag: of allgather and alltoall
started = []


def start(transfer, error, capacity):
    asked = nccl_calls.agreed(transfer.contents, size)
    started.append((asked.kind, asked.reduce, asked.contributors, asked.count))
    source, target = memory.get(transfer.contents.input), memory.get(transfer.contents.output)
    if source is None:  # joined, or without rows
        source = np.zeros(asked.count, dtype=np.float32)
    if target is None:
        length = source.nbytes if asked.kind == _native.ALLREDUCE else nccl_calls.received_bytes(asked, rank)
        target = received[asked.tag] = np.full(length, 255, dtype=np.uint8)
    library.put(nccl_calls.calls(asked), source.ctypes.data, target.ctypes.data, size, 0)
    if asked.reduce == _native.AVERAGE and asked.tag:
        target /= asked.contributors
    return 0


questions = 0


def test(process_set, error, capacity):
    global questions
    questions += 1
    return questions % 3 == 0  # now and then not yet


_native.use_transport(start, test, device=_native.GPU_MEMORY)


def on_gpu(kind, name, array, at, into=None, **more):
    memory[at] = array
    return _native.operation(kind, name, "float32", array.shape, array.size, at, into or at, device=_native.GPU_MEMORY, **more)


def rows_of(kind, name, array, splits=None):
    """What an allgather or alltoall of the array brings, and the rows from each rank."""
    asked = on_gpu(kind, name, array, 0x1000 if array.size else 0, splits=splits)
    asked.output, asked.tag = None, len(started) + 1
    handle = _native.submit(asked, _native.BLOCKING)
    _native.wait(handle)
    address, length, rows = _native.gathered(handle, size)
    _native.release(handle)
    assert not address, "the engine has no memory for it"
    assert length == 0
    return received.pop(asked.tag, np.empty(0, dtype=np.float32)).view(np.float32).reshape(-1, *array.shape[1:]), rows


def problem_of(operation):
    try:
        _native.run(operation)
    except cc.CollectiveError as error:
        return f"{error.kind}: {error}"
    return "none"


def rows_from(number, count, width=2):
    """Rows of a rank that are like no other's."""
    return (np.arange(count * width, dtype=np.float32) + 100 * number).reshape(count, width)


for count in (1, 5, 100_000):
    array = np.full(count, 1.0 + rank, dtype=np.float32)
    _native.run(on_gpu(_native.ALLREDUCE, f"sum {count}", array, 0x1000 + count))
    assert (array == size * (size + 1) / 2).all()
    array[:] = rank
    _native.run(on_gpu(_native.BROADCAST, f"broadcast {count}", array, 0x1000 + count, root=size - 1))
    assert (array == size - 1).all()
assert len(started) == 6, started

for name, counts in {"even": [2] * size, "uneven": list(range(size)), "empty": [0] * size}.items():
    got, rows = rows_of(_native.ALLGATHER, f"gather {name}", rows_from(rank, counts[rank]))
    assert rows == counts
    assert np.array_equal(got, np.concatenate([rows_from(r, counts[r]) for r in range(size)]))
    # Rank r has counts[r] rows for each rank but the first, for which nobody has any.
    splits = [[0] + [counts[r]] * (size - 1) for r in range(size)]
    got, rows = rows_of(_native.ALLTOALL, f"alltoall {name}", rows_from(rank, sum(splits[rank])), splits[rank])
    assert rows == [splits[r][rank] for r in range(size)]
    parts = [np.split(rows_from(r, sum(splits[r])), np.cumsum(splits[r])[:-1])[rank] for r in range(size)]
    assert np.array_equal(got, np.concatenate(parts))
for rows in (2 * size, 2 * size + 1, 1):
    array = rows_from(rank, rows)
    mine = memory[0x9000] = np.zeros((len(np.array_split(array, size)[rank]), 2), dtype=np.float32)
    _native.run(on_gpu(_native.REDUCESCATTER, f"scatter {rows}", array, 0x1000, 0x9000))
    assert np.array_equal(mine, np.array_split(sum(rows_from(r, rows) for r in range(size)), size)[rank])
assert len(started) == 13, "nothing is carried where no rank has rows"
assert {*library.made, "ncclRecv"} == {  # rank 0 has received nothing
    *("ncclAllReduce", "ncclBroadcast", "ncclAllGather", "ncclSend", "ncclRecv", "ncclReduceScatter", "ncclReduce"),
}

# Other ranks' wishes differ, one has its tensor elsewhere: errors on all, and nothing was started.
for different in ("shape", "device"):
    array = np.ones(10 + (rank if different == "shape" else 0), dtype=np.float32)
    asked = on_gpu(_native.ALLREDUCE, f"odd {different}", array, 0x1000)
    if different == "device" and rank == 0:
        asked = _native.operation(_native.ALLREDUCE, f"odd {different}", "float32", (10,), 10, array.ctypes.data, array.ctypes.data)
    said = problem_of(asked)
    assert said.startswith("mismatch"), said
    assert "on a GPU" in said
assert len(started) == 13, started

# A rank that has joined is called without memory: an average does not count it, it has no rows, and what is sent to it goes nowhere.
if rank > 0:
    array = np.full(1000, 6.0, dtype=np.float32)
    asked = on_gpu(_native.ALLREDUCE, "without rank 0", array, 0x1000, reduce=_native.AVERAGE)
    asked.tag = 1000
    _native.run(asked)
    assert (array == 6.0).all()
    got, rows = rows_of(_native.ALLGATHER, "gather without rank 0", rows_from(rank, 3))
    assert rows == [0] + [3] * (size - 1)
    assert np.array_equal(got, np.concatenate([rows_from(r, 3) for r in range(1, size)]))
    got, rows = rows_of(_native.ALLTOALL, "alltoall without rank 0", rows_from(rank, size), [1] * size)
    assert rows == [0] + [1] * (size - 1)
    assert np.array_equal(got, np.stack([rows_from(r, size)[rank] for r in range(1, size)]))
    mine = memory[0x9000] = np.zeros((2, 2), dtype=np.float32)
    _native.run(on_gpu(_native.REDUCESCATTER, "scatter without rank 0", rows_from(rank, 2 * size), 0x1000, 0x9000))
    assert np.array_equal(mine, np.split(sum(rows_from(r, 2 * size) for r in range(1, size)), size)[rank])
cc.join()
assert len(started) == 17, started
assert started[13] == (_native.ALLREDUCE, _native.AVERAGE, size - 1, 1000), started[13]
common.report(done=True)
