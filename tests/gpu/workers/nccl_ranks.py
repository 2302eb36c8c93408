"""On GPUs, one per rank: NCCL against the sum on the CPU; nothing waits for the GPU; the order of the program holds."""

import json
import os
import sys

import busy
import collective_core.torch as hvd
import torch
from collective_core.transport import nccl

hvd.init()
rank, size = hvd.rank(), hvd.size()
torch.cuda.set_device(hvd.local_rank())
assert hvd.nccl_enabled(), "every rank has a GPU and the same NCCL"
with open("/proc/self/maps") as mapped:
    loaded = {line.split()[-1] for line in mapped if "libnccl.so" in line}
assert loaded == {os.path.realpath(nccl.library().path)} or loaded == {nccl.library().path}, "one copy: PyTorch's"


def values(of_rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * of_rank + count)
    return torch.randint(-8, 9, (count,), generator=generator).to(dtype)


for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64):
    for count in (1, 1000, 1 << 20):
        everyone = [values(r, count, dtype) for r in range(size)]
        mine = everyone[rank].cuda()
        got = hvd.allreduce(mine, op=hvd.Sum, name=f"sum.{dtype}.{count}")
        assert got.is_cuda
        assert torch.equal(got.cpu(), torch.stack(everyone).sum(0).to(dtype)), (dtype, count)  # small whole numbers: exact in any order
        assert torch.equal(mine.cpu(), everyone[rank]), "the input was changed"
        hvd.allreduce_(mine, op=hvd.Max)
        assert torch.equal(mine.cpu(), torch.stack(everyone).max(0).values), (dtype, count)
        assert torch.equal(hvd.broadcast(everyone[rank].cuda(), size - 1).cpu(), everyone[size - 1])
average = hvd.allreduce(torch.full((1000,), float(rank), device="cuda"), prescale_factor=2.0)
assert torch.allclose(average.cpu(), torch.full((1000,), (size - 1.0)))

# The GPU is kept busy, then fills the tensor; the sum is asked for, used and asked for again, all before it is idle.
tensor = torch.zeros(1 << 20, device="cuda")


def fill_and_sum_twice():
    tensor.fill_(1.0 + rank)
    hvd.synchronize(hvd.allreduce_async_(tensor, op=hvd.Sum, name="ordered"))
    tensor.mul_(2.0)
    return hvd.allreduce_(tensor, op=hvd.Sum, name="again")


_, asked, waited = busy.asked_for(fill_and_sum_twice)
assert (tensor.cpu() == size * size * (size + 1)).all()

# A training step: gradients stay on the GPU, in buckets, and end the same as on the CPU.
torch.manual_seed(1)
model = torch.nn.Linear(64, 8).cuda()
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters())
for _ in range(3):
    optimizer.zero_grad()
    model(torch.full((4, 64), 1.0 + rank, device="cuda")).sum().backward()
    optimizer.step()
assert model.weight.grad.is_cuda
assert torch.allclose(model.weight.grad.cpu(), torch.full((8, 64), 4 * (size + 1) / 2))

# A disagreement, and a rank without data.
try:
    hvd.allreduce(torch.ones(10 + rank, device="cuda"), name="odd")
    problem = "none"
except hvd.HorovodInternalError as error:
    problem = error.kind
assert problem == "mismatch", problem
if rank > 0:
    assert (hvd.allreduce(torch.full((5000,), 3.0, device="cuda"), name="without rank 0").cpu() == 3.0).all()
hvd.join()
sys.stdout.write("REPORT " + json.dumps({"rank": rank, "asked": asked, "waited": waited, "version": hvd.nccl_built()}) + "\n")
