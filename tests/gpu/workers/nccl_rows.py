"""On GPUs, one per rank: allgather, alltoall, reducescatter and sparse sums through NCCL, against the same on the CPU."""

import json
import sys

import busy
import collective_core.torch as hvd
import torch

hvd.init()
rank, size = hvd.rank(), hvd.size()
torch.cuda.set_device(hvd.local_rank())
assert hvd.nccl_enabled(), "every rank has a GPU and the same NCCL"


def both(ask, *tensors):
    """What `ask` makes of the tensors on the GPU and on the CPU: whole numbers, and small ones, so both are the same."""
    got, expected = ask(*(tensor.cuda() for tensor in tensors)), ask(*tensors)
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine.cpu(), theirs), (mine, theirs)
    assert got[0].is_cuda


def rows(count, dtype=torch.float32, width=5):
    generator = torch.Generator().manual_seed(100 * rank + count)
    return torch.randint(0, 9, (count, width), generator=generator).to(dtype)


def in_turn(other):
    """Rows for a rank: none for some."""
    return (rank + other) % 3 * 100


for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.uint8, torch.int64):
    for count in (1, 1000, 1 + rank, 1000 * rank, 0):
        both(lambda tensor: [hvd.allgather(tensor)], rows(count, dtype))
        both(lambda tensor: hvd.alltoall(tensor, [len(tensor) // size] * size), rows(count * size, dtype))
    splits = [in_turn(other) for other in range(size)]
    both(lambda tensor, splits=splits: hvd.alltoall(tensor, splits), rows(sum(splits), dtype))
for op in (hvd.Sum, hvd.Min, hvd.Max, hvd.Product):
    for dtype in (torch.float32, torch.float64, torch.float16, torch.int32):
        for count in (1, size, 100 * size, 100 * size + 1):
            both(lambda tensor, op=op: [hvd.reducescatter(tensor, op=op)], rows(count, dtype))
for count in (4 * size, 4 * size + 1):  # an average of whole numbers that divide
    both(lambda tensor: [hvd.reducescatter(tensor, prescale_factor=4.0, postscale_factor=size)], rows(count))
both(lambda tensor: [hvd.reducescatter(tensor, op=hvd.Sum)], rows(size + 1, torch.int16))  # through host memory
both(lambda one, two: hvd.grouped_allgather([one, two]), rows(3), rows(rank))
both(lambda tensor: [hvd.allgather(tensor.t())], rows(4, width=4))


def sparse_sum(values):
    tensor = torch.sparse_coo_tensor(torch.tensor([[rank, 5, 5]], device=values.device), values, (9, 5))
    return [hvd.synchronize(hvd.sparse_allreduce_async(tensor, "rows", op=hvd.Sum)).to_dense()]


def gradients(tensor):
    found = []
    for ask in (hvd.allgather, hvd.alltoall, lambda leaf: hvd.reducescatter(leaf, op=hvd.Sum)):
        leaf = tensor.clone().requires_grad_()
        (ask(leaf) * (rank + 1) * size).sum().backward()
        found.append(leaf.grad)
    return found


both(sparse_sum, rows(3))
both(gradients, rows(2 * size))
if size > 2:
    few = hvd.add_process_set([0, 1])
    if rank < 2:
        both(lambda tensor: [hvd.allgather(tensor, process_set=few)], rows(rank + 1))
        both(lambda tensor: [hvd.reducescatter(tensor, op=hvd.Sum, process_set=few)], rows(7))
        both(lambda tensor: hvd.alltoall(tensor, [1, 2], process_set=few), rows(3))

tensor = torch.zeros(1 << 18, 4, device="cuda")


def chain():
    gathered = hvd.synchronize(hvd.allgather_async(tensor, name="ordered"))
    exchanged = hvd.alltoall(gathered)
    del gathered  # its memory is still in use, on both streams
    return hvd.reducescatter(exchanged * 2.0, op=hvd.Sum)


# The GPU is kept busy, then fills the tensor; its rows are asked for, used and asked for again, all before it is idle.
def fill_and_chain():
    tensor.fill_(1.0 + rank)
    return chain()


for _ in range(2):  # the first rounds see to memory and connections
    chain()
    torch.cuda.synchronize()
scattered, asked, waited = busy.asked_for(fill_and_chain)
assert scattered.shape == tensor.shape
assert (scattered.cpu() == size * (size + 1)).all()

# Without rank 0: it sends no rows, and what is sent to it goes nowhere.
if rank > 0:
    mine = torch.full((size, 3), 1.0 + rank, device="cuda")
    assert torch.equal(hvd.allgather(mine).cpu(), torch.arange(2.0, size + 1).repeat_interleave(size).reshape(-1, 1).expand(-1, 3))
    assert torch.equal(hvd.alltoall(mine).cpu(), torch.arange(2.0, size + 1).reshape(-1, 1).expand(-1, 3))
    for more in (0, 1):  # even shares, and others
        share = hvd.reducescatter(torch.full((size + more, 3), 6.0, device="cuda"), op=hvd.Average)
        assert (share.cpu() == 6.0).all()
        assert (hvd.reducescatter(torch.full((size + more, 3), 6, device="cuda"), op=hvd.Min).cpu() == 6).all()
hvd.join()
sys.stdout.write("REPORT " + json.dumps({"rank": rank, "asked": asked, "waited": waited, "version": hvd.nccl_built()}) + "\n")
