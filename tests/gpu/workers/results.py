"""On a GPU: every collective against the same on the CPU; nothing waits for the GPU; the order of the program holds.

TEST_WAY: ``nccl`` or ``host``, which way tensors have to go.
"""

import json
import os
import sys

import busy
import collective_core.torch as hvd
import torch

hvd.init()
rank, size = hvd.rank(), hvd.size()
busy.choose_gpu()
way = os.environ["TEST_WAY"]


def both(ask, *tensors):
    """What `ask` makes of the tensors on the GPU and on the CPU: whole numbers, and small ones, so both are the same."""
    on_gpu = [tensor.cuda() for tensor in tensors]
    got, expected = ask(*on_gpu), ask(*tensors)
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.dtype == theirs.dtype
        assert mine.is_cuda
        assert torch.equal(mine.cpu(), theirs), (mine, theirs)


def rows(count, dtype=torch.float32, width=5):
    generator = torch.Generator().manual_seed(100 * rank + count)
    return torch.randint(0, 9, (count, width), generator=generator).to(dtype)


def exchanged(tensor, splits, **options):
    received, rows_of_each = hvd.alltoall(tensor, splits, **options)
    return [received, rows_of_each.to(received.device)]


def in_turn(other):
    """Rows for a rank: none for some."""
    return (rank + other) % 3 * 100


both(lambda tensor: [hvd.allreduce(tensor, op=hvd.Sum)], rows(1))
assert hvd.nccl_enabled() == (way == "nccl")
for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.int16, torch.uint8):
    for count in (1, 1000, 200_000):
        for op in (hvd.Sum, hvd.Max, hvd.Min):
            both(lambda tensor, op=op: [hvd.allreduce(tensor, op=op), hvd.allreduce_(tensor.clone(), op=op)], rows(count, dtype))
        both(lambda tensor: [hvd.broadcast(tensor, size - 1), hvd.broadcast_(tensor.clone(), 0)], rows(count, dtype))
    for count in (1, 1000, 1 + rank, 1000 * rank, 0):
        both(lambda tensor: [hvd.allgather(tensor)], rows(count, dtype))
        both(lambda tensor: exchanged(tensor, [len(tensor) // size] * size), rows(count * size, dtype))
    splits = [in_turn(other) for other in range(size)]
    both(lambda tensor, splits=splits: exchanged(tensor, splits), rows(sum(splits), dtype))
    for count in (1, size, 100 * size, 100 * size + 1):
        both(lambda tensor: [hvd.reducescatter(tensor, op=hvd.Sum)], rows(count, dtype))
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    both(lambda tensor: [hvd.allreduce(tensor), hvd.reducescatter(tensor)], size * rows(4 * size, dtype))
    both(lambda tensor: [hvd.allreduce_(tensor.clone(), prescale_factor=2.0, postscale_factor=0.5)], size * rows(4, dtype))
overflowing = torch.full((1000,), 60000.0, dtype=torch.float16, device="cuda")
assert torch.equal(hvd.allreduce(overflowing), overflowing), "divided before it is summed"
both(lambda one, two: hvd.grouped_allgather([one, two]), rows(3), rows(rank))
both(lambda one, two: hvd.grouped_allreduce([one, two], op=hvd.Sum), rows(3), rows(4))
both(lambda tensor: [hvd.allgather(tensor.t()), hvd.allreduce(tensor.t(), op=hvd.Sum)], rows(4, width=4))


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
        both(lambda tensor: exchanged(tensor, [1, 2], process_set=few), rows(3))

# Training: gradients stay on the GPU, in buckets, and end the same as they must.
torch.manual_seed(1)
model = torch.nn.Linear(64, 8).cuda()
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, step=0)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.full((4, 64), 1.0 + rank, device="cuda")).sum().backward()
    optimizer.step()
    state.commit()
assert model.weight.grad.is_cuda
assert torch.allclose(model.weight.grad.cpu(), torch.full((8, 64), 4 * (size + 1) / 2))

asked = waited = 0.0
if way == "nccl":
    # The GPU is kept busy, then fills the tensor; it is summed and exchanged, used and asked for again, all before it is idle.
    tensor = torch.zeros(1 << 18, 4, device="cuda")

    def chain():
        hvd.synchronize(hvd.allreduce_async_(tensor, op=hvd.Sum, name="ordered"))
        tensor.mul_(2.0)
        gathered = hvd.synchronize(hvd.allgather_async(tensor, name="rows"))
        exchanged = hvd.alltoall(gathered)
        del gathered  # its memory is still in use, on both streams
        return hvd.reducescatter(exchanged, op=hvd.Sum)

    def fill_and_chain():
        tensor.fill_(1.0 + rank)
        return chain()

    for _ in range(2):  # the first rounds see to memory and connections
        chain()
        torch.cuda.synchronize()
    scattered, asked, waited = busy.asked_for(fill_and_chain)
    assert scattered.shape == tensor.shape
    assert (scattered.cpu() == size * size * (size + 1)).all()

# A disagreement, and a rank without data.
if size > 1:
    try:
        hvd.allreduce(torch.ones(10 + rank, device="cuda"), name="odd")
        problem = "none"
    except hvd.HorovodInternalError as error:
        problem = error.kind
    assert problem == "mismatch", problem
if rank > 0:
    assert (hvd.allreduce(torch.full((5000,), 3.0, device="cuda"), name="without rank 0").cpu() == 3.0).all()
    mine = torch.full((size, 3), 1.0 + rank, device="cuda")
    assert torch.equal(hvd.allgather(mine).cpu(), torch.arange(2.0, size + 1).repeat_interleave(size).reshape(-1, 1).expand(-1, 3))
    assert torch.equal(hvd.alltoall(mine).cpu(), torch.arange(2.0, size + 1).reshape(-1, 1).expand(-1, 3))
    for more in (0, 1):  # even shares, and others
        share = hvd.reducescatter(torch.full((size + more, 3), 6.0, device="cuda"), op=hvd.Average)
        assert (share.cpu() == 6.0).all()
hvd.join()
sys.stdout.write("REPORT " + json.dumps({"rank": rank, "asked": asked, "waited": waited, "version": hvd.nccl_built()}) + "\n")
