"""The torch API's way through NCCL, without a GPU: tensors in host memory count as a GPU's, MPI stands in for NCCL (nccl_by_mpi.py).

Everything is asked for twice, through the engine and through the stand-in, which have to agree.
"""

import contextlib

import collective_core.torch as hvd
import common
import torch
from collective_core.torch import gpu
from collective_core.transport import nccl
from nccl_by_mpi import Library

happened = []  # in order: what was put on streams


class Stream:
    cuda_stream = 0

    def __init__(self, name):
        self.name = name

    def wait_event(self, event):
        happened.append(("wait", self.name, event))


class Event:
    def record(self, stream):
        happened.append(("record", stream.name, self))

    def query(self):
        return True


callers = Stream("caller's")
torch.cuda.Event = Event
torch.cuda.Stream = lambda _device: Stream("own")
torch.cuda.current_stream = lambda _device: callers
torch.cuda.stream = torch.cuda.device = lambda _which: contextlib.nullcontext()
torch.cuda.is_available = lambda: True
torch.Tensor.record_stream = lambda tensor, stream: happened.append(("keep", stream.name, tensor.data_ptr()))

library = Library({common.SIZE: range(common.SIZE), 2: [0, 1]})
put = library.put
library.put = lambda calls, *places: (happened.append(("put", *places[:2])), put(calls, *places))
nccl.library = lambda: library
nccl.is_wanted = lambda: True
through_it = True
gpu.moves_with_nccl = lambda tensor, who: through_it and who.id in gpu.sets and tensor.layout is torch.strided

few = hvd.ProcessSet([0, 1])
hvd.init(process_sets=[few] if common.SIZE > 2 else None)
rank, size = hvd.rank(), hvd.size()
for one in gpu.sets.values():
    one.device = torch.device("cpu")  # which a rank that joins first has not seen


def both(ask, *functions):
    """What `ask` gives both ways, which must be the same, by these functions of NCCL."""
    global through_it
    through_it = False
    expected = ask()
    through_it, before = True, len(library.made)
    got = ask()
    assert len(got) == len(expected)
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs), (mine, theirs)
    assert set(library.made[before:]) == set(functions), library.made[before:]


def rows(count, dtype=torch.float32):
    return (torch.arange(count * 3).reshape(count, 3) % 7 + 10 * rank).to(dtype)


for dtype in (torch.float32, torch.int16, torch.bool, torch.bfloat16):  # also what NCCL has no type for
    both(lambda dtype=dtype: [hvd.allgather(rows(2, dtype))], "ncclAllGather")
    both(lambda dtype=dtype: [hvd.allgather(rows(rank, dtype))], "ncclBroadcast")
    both(lambda dtype=dtype: hvd.alltoall(rows(size, dtype), [1] * size), "ncclSend", "ncclRecv")
both(lambda: [hvd.allgather(rows(0)), hvd.alltoall(rows(0))])
both(lambda: [hvd.allgather(torch.arange(6.0).reshape(2, 3).t())], "ncclAllGather")  # not contiguous
both(lambda: hvd.grouped_allgather([rows(1), rows(rank)]), "ncclAllGather", "ncclBroadcast")
splits = torch.tensor([(rank + other) % 3 for other in range(size)], dtype=torch.int32)
both(lambda: hvd.synchronize(hvd.alltoall_async(rows(int(splits.sum())), splits)), "ncclSend", "ncclRecv")
for op in (hvd.Sum, hvd.Average, hvd.Min, hvd.Max, hvd.Product):
    both(lambda op=op: [hvd.reducescatter(rows(2 * size), op=op)], "ncclReduceScatter")
    both(lambda op=op: [hvd.reducescatter(rows(2 * size + 1), op=op)], "ncclReduce")
both(lambda: [hvd.reducescatter(rows(1), op=hvd.Average, prescale_factor=2.0, postscale_factor=0.5)], "ncclReduce")
both(lambda: [hvd.reducescatter(rows(size, torch.int64), op=hvd.Sum)], "ncclReduceScatter")
both(lambda: [hvd.reducescatter(rows(size, torch.int16), op=hvd.Sum), hvd.reducescatter(rows(size, torch.int64), op=hvd.Average)])
sparse = torch.sparse_coo_tensor(torch.tensor([[rank, 5] * (rank % 2)]), torch.ones(2 * (rank % 2), 2), (9, 2))
both(lambda: [hvd.synchronize(hvd.sparse_allreduce_async(sparse, "rows")).to_dense()], "ncclBroadcast")
if size > 2 and rank < 2:
    both(lambda: [hvd.allgather(rows(rank + 1), process_set=few)], "ncclBroadcast")
    both(lambda: [hvd.reducescatter(rows(4), process_set=few)], "ncclReduceScatter")


# Gradients take the same way.
def gradient(ask):
    tensor = rows(size).requires_grad_()
    (ask(tensor) * (rank + 2.0)).sum().backward()
    return [tensor.grad]


both(lambda: gradient(hvd.allgather), "ncclAllGather", "ncclAllReduce")
both(lambda: gradient(hvd.alltoall), "ncclSend", "ncclRecv")
both(lambda: gradient(hvd.reducescatter), "ncclReduceScatter", "ncclAllGather")


def without_rank_0():
    got = []
    if rank > 0:
        got = [hvd.allreduce(rows(4)), hvd.broadcast(rows(4), size - 1), hvd.allgather(rows(rank)), *hvd.alltoall(rows(size), [1] * size)]
        got += [hvd.reducescatter(rows(size + 1), op=op) for op in (hvd.Average, hvd.Min, hvd.Product)]
        got += [hvd.reducescatter(rows(size, torch.int32), op=hvd.Max)]
    hvd.join()
    return got


carried = ["ncclAllReduce", "ncclBroadcast", "ncclReduce", "ncclReduceScatter", "ncclRecv", *(["ncclSend"] if rank else [])]
both(without_rank_0, *carried)

# The order on the streams, and which memory each of them is at work on.
source = rows(rank + 1)
happened.clear()
got = hvd.allgather(source)
ready, done, end = (event for what, _, event in happened if what == "record")
begin, into = source.data_ptr(), got.data_ptr()
assert happened == [
    ("record", "caller's", ready),
    ("wait", "own", ready),
    ("keep", "own", begin),
    ("keep", "own", into),
    ("put", begin, into),
    ("record", "own", done),
    ("record", "own", end),
    ("wait", "caller's", done),
    ("keep", "caller's", into),
], happened
common.report(done=True)
