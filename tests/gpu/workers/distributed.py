"""torch.distributed's collectives with tensors of a GPU over the backend of the argument; DDP and FSDP2.

Every rank takes the first GPU. TEST_WAY: ``nccl`` or ``host``, which way tensors have to go. With NCCL nobody waits for the GPU.
"""

import os
import statistics
import sys
import time

import busy
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

torch.cuda.set_device(0)
dist.init_process_group(sys.argv[1], device_id=torch.device("cuda", 0))
rank, size = dist.get_rank(), dist.get_world_size()


def on_gpu(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype, device="cuda")


def check(tensor, expected):
    assert tensor.is_cuda
    assert tensor.tolist() == list(expected), (tensor, expected)


for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64):
    summed = on_gpu(1 + rank, 2, dtype=dtype)
    dist.all_reduce(summed)
    check(summed, [size * (size + 1) // 2, 2 * size])
on_host = torch.tensor([1.0 + rank])
dist.all_reduce(on_host)
assert on_host.item() == size * (size + 1) / 2
gathered = [torch.empty(2, device="cuda") for _ in range(size)]
dist.all_gather(gathered, on_gpu(rank, -rank))
for other, rows in enumerate(gathered):
    check(rows, [other, -other])
together = torch.empty(size, device="cuda")
dist.all_gather_into_tensor(together, on_gpu(rank))
check(together, range(size))
part = torch.zeros(2, device="cuda")
dist.reduce_scatter_tensor(part, torch.arange(2.0 * size, device="cuda"))
check(part, [size * 2 * rank, size * (2 * rank + 1)])
received = torch.empty(size, device="cuda")
dist.all_to_all_single(received, torch.full((size,), float(rank), device="cuda"))
check(received, range(size))
sent = on_gpu(rank, 7)
dist.broadcast(sent, size - 1)
check(sent, [size - 1, 7])
scattered = torch.zeros(1, device="cuda")
dist.scatter(scattered, [on_gpu(other) for other in range(size)] if rank == 0 else None, src=0)
check(scattered, [rank])
if size > 1 and rank < 2:
    message = on_gpu(5, 6) if rank == 0 else torch.zeros(2, device="cuda")
    (dist.send if rank == 0 else dist.recv)(message, 1 - rank)
    check(message, [5, 6])
alone = dist.new_group([0])
if rank == 0:
    mine = on_gpu(3)
    dist.all_reduce(mine, group=alone)
    check(mine, [3])
dist.barrier()

# The GPU is busy, then fills the tensor, which is summed.
tensor = torch.zeros(1 << 20, device="cuda")


def fill_and_sum():
    tensor.fill_(1.0 + rank)
    return dist.all_reduce(tensor, async_op=True)


for _ in range(2):
    fill_and_sum().wait()
    torch.cuda.synchronize()
(work, asked, _) = busy.asked_for(fill_and_sum) if os.environ["TEST_WAY"] == "nccl" else (fill_and_sum(), 0.0, 0.0)
work.wait()
assert (tensor == size * (size + 1) / 2).all()

torch.manual_seed(1)
layers = [layer for _ in range(12) for layer in (torch.nn.Linear(2048, 2048), torch.nn.ReLU())]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers).cuda(), gradient_as_bucket_view=True)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
torch.manual_seed(100 + rank)
x = torch.randn(64, 2048, device="cuda")
steps = []
for _ in range(6):
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(10):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    torch.cuda.synchronize()
    steps.append((time.perf_counter() - begin) * 100)
weights = [None] * size
dist.all_gather_object(weights, sum(parameter.double().sum().item() for parameter in model.parameters()))
assert len(set(weights)) == 1, weights

model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(3))).cuda()
torch.manual_seed(2)
for layer in model:
    torch.nn.init.normal_(layer.weight, std=0.1)
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(5):
    optimizer.zero_grad()
    loss = model(x[:, :256]).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < losses[0], losses
print(f"REPORT rank {rank} of {size}, {sys.argv[1]}: DDP {statistics.median(steps[1:]):.2f} ms a step, asked {asked:.4f} s", flush=True)
dist.destroy_process_group()
