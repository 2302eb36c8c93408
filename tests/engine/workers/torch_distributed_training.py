"""DDP, FSDP2, DTensor and DCP on the backend `collective`: what one process with all the data would have come to."""

import tempfile

import common
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

dist.init_process_group("collective")
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (size,))


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))


def train(trained, mine):
    optimizer = torch.optim.Adam(trained.parameters(), lr=0.01)
    for step in range(5):
        torch.manual_seed(step)
        rows = torch.randn(4 * size, 16)
        optimizer.zero_grad()
        trained(rows[4 * rank : 4 * (rank + 1)] if mine else rows).square().mean().backward()
        optimizer.step()
    return list(trained.parameters())


def is_close(one, other):
    return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(one, other, strict=True))


alone = train(model(), mine=False)
ddp = train(nn.parallel.DistributedDataParallel(model()), mine=True)
sharded = model()
for layer in sharded:
    fully_shard(layer, mesh=mesh)
fully_shard(sharded, mesh=mesh)
fsdp = [each.full_tensor() for each in train(sharded, mine=True)]

table = torch.arange(12.0).view(4, 3)
rows = distribute_tensor(table, mesh, [Shard(0)])
columns = rows.redistribute(placements=[Shard(1)])

folder = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(folder, 0)
dcp.save({"model": sharded.state_dict()}, checkpoint_id=folder[0])
for parameter in sharded.parameters():
    parameter.data.zero_()
state = {"model": sharded.state_dict()}
dcp.load(state, checkpoint_id=folder[0])
restored = [each.full_tensor() for each in sharded.parameters()]


@torch.compile(backend="eager", fullgraph=True)
def compiled(tensor):
    return torch.distributed._functional_collectives.all_reduce(tensor, "sum", list(range(size))) + 1


def train_with_hook(hook):
    """Parameters after three steps with one of DDP's built-in hooks; None: without."""
    trained = nn.parallel.DistributedDataParallel(model())
    if hook is not None:
        trained._register_builtin_comm_hook(hook)
    return train(trained, mine=True)


hooks = [train_with_hook(each) for each in dist.BuiltinCommHookType.__members__.values()]
halves = torch.full((3,), float(rank), dtype=torch.float16)
half = dist.all_reduce(halves, async_op=True).get_future().then(lambda done: done.value()[0] + 1).wait()

compiled_ddp = torch.compile(nn.parallel.DistributedDataParallel(model()), backend="aot_eager")
compiled_training = train(compiled_ddp, mine=True)

dcp.async_save({"table": table}, checkpoint_id=f"{folder[0]}/later").result()
later = {"table": torch.zeros(4, 3)}
dcp.load(later, checkpoint_id=f"{folder[0]}/later")

placements = [f"rank:{each}/cpu" for each in range(size)]
whole = torch.zeros(2 * size, 3) if rank == 0 else None
sharded_tensor.full(ChunkShardingSpec(dim=0, placements=placements), (2 * size, 3), 5.0).gather(0, whole)

common.report(
    hooks=[all(torch.allclose(a, b, atol=1e-2) for a, b in zip(each, alone, strict=True)) for each in hooks],
    half=half.tolist(),
    compiled_ddp=is_close(compiled_training, alone),
    async_save=torch.equal(later["table"], table),
    sharded_tensor=whole is None or torch.equal(whole, torch.full((2 * size, 3), 5.0)),
    ddp=is_close(ddp, alone),
    fsdp=is_close(fsdp, alone),
    dtensor=torch.equal(columns.full_tensor(), table) and torch.equal(rows.redistribute(placements=[Replicate()]).to_local(), table),
    dcp=all(torch.equal(a, b) for a, b in zip(restored, fsdp, strict=True)),
    compiled=compiled(torch.ones(3)).tolist(),
)
dist.destroy_process_group()
