"""A group whose CUDA tensors go through PyTorch's own backend: here tensors of float64 are a GPU's, and Gloo is in NCCL's place.

Two ranks. Argument: ranks that a GPU is pretended for.
"""

import sys
import warnings
from datetime import timedelta

import collective_core.torch as hvd
import common
import torch
import torch.distributed as dist
from collective_core.torch.backend import cuda


class Pretended(cuda.Cuda):
    device = "cpu"

    def gpus(self):
        return [f"GPU {number}" for number in range(int(sys.argv[1]))]

    def holds(self, tensor):
        return tensor.dtype is torch.float64

    def finish(self, device):
        finished.append((device, operations()))

    def backend(self, store, rank, size, timeout):
        assert timeout > timedelta(0)
        return dist.ProcessGroupGloo(store, rank, size, timeout)


finished = []  # devices whose stream a barrier has waited for, and how many operations the engine had run then
cuda.platform = Pretended()
warnings.simplefilter("always")
dist.init_process_group("cpu:collective,cuda:nccl")
rank, size = dist.get_rank(), dist.get_world_size()
wrong = []
# What init_process_group asks where it is given a device_id, which it takes on a machine with GPUs only: NCCL's, which connects at once.
carrier = dist.group.WORLD._get_backend(torch.device("cuda", 0))
if isinstance(carrier, dist.ProcessGroupGloo) != (int(sys.argv[1]) > 1):
    wrong.append(f"{carrier} for CUDA tensors")
if carrier is dist.group.WORLD and carrier.supports_splitting:
    wrong.append("a group without NCCL is asked to connect at once")


def operations():
    """That the engine has run."""
    return sum(each["operations"] for each in hvd.metrics()["operations"])


def everything(dtype, group=None):
    """Results of all collectives."""
    own = torch.arange(4, dtype=dtype) + rank
    results = [own.clone()]
    dist.all_reduce(results[-1], group=group)
    results.append(own.clone())
    dist.reduce(results[-1], 0, group=group)
    if rank:
        results.pop()
    results.append(own.clone())
    dist.broadcast(results[-1], 1, group=group)
    gathered = [torch.zeros(4, dtype=dtype) for _ in range(size)]
    dist.all_gather(gathered, own, group=group)
    results += gathered
    results.append(torch.zeros(4 * size, dtype=dtype))
    dist.all_gather_into_tensor(results[-1], own, group=group)
    results.append(torch.zeros(2, dtype=dtype))
    dist.reduce_scatter_tensor(results[-1], own, group=group)
    results.append(torch.zeros(2, dtype=dtype))
    dist.reduce_scatter(results[-1], list(own.chunk(2)), group=group)
    results.append(torch.zeros(4, dtype=dtype))
    dist.all_to_all_single(results[-1], own, group=group)
    to_root = [torch.zeros(4, dtype=dtype) for _ in range(size)] if rank == 0 else None
    dist.gather(own, to_root, dst=0, group=group)
    results += to_root or []
    results.append(torch.zeros(4, dtype=dtype))
    dist.scatter(results[-1], [own, own + 1] if rank == 0 else None, src=0, group=group)
    results.append(torch.zeros(4, dtype=dtype))
    if rank == 0:
        dist.send(own, 1, group=group)
        dist.recv(results[-1], 1, group=group)
    else:
        dist.recv(results[-1], 0, group=group)
        dist.send(own, 0, group=group)
    under_way = [(dist.all_reduce(each, group=group, async_op=True), each) for each in (own.clone(), own + 1)]
    scattered = torch.zeros(2, dtype=dtype)
    under_way.append((dist.reduce_scatter_tensor(scattered, own, group=group, async_op=True), scattered))
    dist.all_reduce(own.clone(), group=group, async_op=True)  # nobody waits for it
    while not under_way[0][0].is_completed():
        pass
    for work, result in reversed(under_way):
        work.wait()
        results.append(result)
    several = [own.clone(), own.clone()]
    with dist.distributed_c10d._coalescing_manager(group=group):
        for each in several:
            dist.all_reduce(each, group=group)
    return [each.tolist() for each in results + several]


for group in (None, dist.new_group()):
    on_host = everything(torch.float32, group)
    before = operations()
    with warnings.catch_warnings(record=True) as said:
        on_gpu = everything(torch.float64, group)
    by_engine = operations() - before
    if on_gpu != on_host:
        wrong.append(f"{on_gpu} instead of {on_host}")
    told = [str(each.message) for each in said if "go through host memory" in str(each.message)]

torch.manual_seed(rank)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1, dtype=torch.float64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 8, dtype=torch.float64)).square().mean().backward()
    optimizer.step()
weights = [parameter.tolist() for parameter in model.parameters()]
every = [None] * size
dist.all_gather_object(every, weights)
if every[0] != every[1]:
    wrong.append(f"after training {every}")
before = operations()
finished.clear()
dist.barrier()
if [done for _, done in finished] != [before]:
    wrong.append(f"a barrier waits for the stream {finished} before operation {before}")
dist.destroy_process_group()
common.report(wrong=wrong, by_engine=by_engine, told=told)
