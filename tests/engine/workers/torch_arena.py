"""FSDP2's buffers, DDP's buckets and their collectives in the engine's memory: the bits that ordinary memory gives. argv: what to do."""

import gc
import os
import signal
import sys
import threading
import time

import common
import torch
import torch.distributed as dist
from collective_core.torch import memory
from collective_core.torch.backend import reducers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import collective_core as cc
from collective_core import _native

dist.init_process_group("collective")
group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
cpu = torch.device("cpu")


def allocate(elements, dtype=torch.float32):
    return group.allocate_tensor(elements, dtype=dtype, device=cpu)


def is_in_arena(tensor):
    return tensor.untyped_storage().data_ptr() in memory._blocks


def model(width=256):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8))


def train(trained, mine, width=256, passes=4):
    """Parameters in the end: of this rank's rows of each batch, or of all."""
    optimizer = torch.optim.Adam(trained.parameters(), lr=0.01)
    for step in range(passes):
        torch.manual_seed(step)
        rows = torch.randn(4 * size, width)
        optimizer.zero_grad()
        trained(rows[4 * rank : 4 * (rank + 1)] if mine else rows).square().mean().backward()
        optimizer.step()
    return [each.detach().clone() for each in trained.parameters()]


def is_close(one, other):
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(one, other, strict=True))


def same_bits():
    """Of allgathers and reduce-scatters: each in ordinary memory, in the arena, and with some ranks' tensors in each."""
    wrong, counts = [], (1, 1000, 70_001, 1_300_003)
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        for count in counts:
            torch.manual_seed(7 * count + rank)
            values = torch.randn(count * size).mul(100).to(dtype)
            for kind in ("all_gather", "reduce_scatter"):
                results = []
                for where in ("ordinary", "arena", "mixed"):
                    in_arena = where == "arena" or (where == "mixed" and rank == 0)
                    whole = allocate(count * size, dtype) if in_arena else torch.empty(count * size, dtype=dtype)
                    if kind == "all_gather":
                        part = whole[rank * count : (rank + 1) * count]
                        part.copy_(values[:count])
                        dist.all_gather_into_tensor(whole, part)
                        results.append(whole.clone())
                    else:
                        whole.copy_(values)
                        part = allocate(count, dtype) if in_arena else torch.empty(count, dtype=dtype)
                        dist.reduce_scatter_tensor(part, whole)
                        results.append(part.clone())
                        if not torch.equal(whole, values):
                            wrong.append((kind, str(dtype), count, "the input was changed"))
                wrong += [(kind, str(dtype), count)] * any(not torch.equal(each, results[0]) for each in results[1:])
    return wrong


def fsdp():
    used = []
    original = memory.allocate

    def noted(elements, dtype):
        tensor = original(elements, dtype)
        used.append(is_in_arena(tensor))
        return tensor

    memory.allocate = noted
    sharded, mesh = model(), init_device_mesh("cpu", (size,))
    for layer in (sharded[0], sharded[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    for part in sharded.modules():
        if isinstance(part, FSDPModule):
            part.set_allocate_memory_from_process_group_for_comm(True)
    train(sharded, mine=True)
    memory.allocate = original
    result = [each.full_tensor() for each in sharded.parameters()]
    sharded.zero_grad()
    return {"buffers": len(used), "in_arena": all(used), "fsdp": is_close(result, train(model(), mine=False))}


def ddp(as_views=False, hook=None, overlaps=False, **how):
    """Whether it trains as one process does, and how many of its buckets lie in the arena."""
    reducers.can_overlap = lambda: overlaps
    before = set(memory._blocks)
    trained = nn.parallel.DistributedDataParallel(model(), gradient_as_bucket_view=as_views, **how)
    if hook is not None:
        trained._register_builtin_comm_hook(hook)
    result, expected = train(trained, mine=True), train(model(), mine=False)
    right = all(torch.allclose(a, b, atol=1e-5 if hook is None else 1e-1) for a, b in zip(result, expected, strict=True))
    return {"right": right, "moved": len(memory._blocks - before), "beside": group.reducers.overlap}


def sparse():
    """Of an embedding whose gradient is sparse."""
    torch.manual_seed(0)
    trained = nn.parallel.DistributedDataParallel(nn.Embedding(50, 4, sparse=True))
    for _ in range(3):
        trained(torch.tensor([rank, 7])).sum().backward()
    return trained.module.weight.grad.to_dense()[7].tolist()


def several():
    """With modules over two groups no sum waits in the backward pass."""
    other = dist.new_group(backend="collective")
    modules = [nn.parallel.DistributedDataParallel(model(), process_group=each) for each in (group, other)]
    for module in modules:
        train(module, mine=True)
    return [each.reducers.overlap for each in (group, other)]


def blocks():
    """Blocks go back with the last view, and the next of their length lies there; in no forked child, nor where there is no room."""
    tensor, view = allocate(1 << 20), None
    address, view = tensor.data_ptr(), tensor[5:]
    used = cc.metrics()["arena_bytes"]
    del tensor
    kept = cc.metrics()["arena_bytes"] == used
    view.fill_(1.0)
    del view
    freed = used - cc.metrics()["arena_bytes"]
    again = allocate(1 << 20)
    child = os.fork()
    if child == 0:
        inside = allocate(1 << 20)
        os._exit(1 if is_in_arena(inside) else 0)
    _, status = os.waitpid(child, 0)
    return {
        "kept": kept,
        "freed": freed,
        "again": again.data_ptr() == address and is_in_arena(again),
        "child": status,
        "nothing": allocate(0).numel(),
        "no_room": _without_room(),
    }


def _without_room():
    def refused(_length, _pages):
        raise cc.CollectiveError("no room", "invalid")

    original, _native.allocate = _native.allocate, refused
    try:
        ordinary = allocate(70_001)
        before, trained = set(memory._blocks), nn.parallel.DistributedDataParallel(model())
        return is_close(train(trained, mine=True), train(model(), mine=False)) and not is_in_arena(ordinary) and before == memory._blocks
    finally:
        _native.allocate = original


def adopted():
    """Tensors that are reduced in place again move, and NumPy's, views and small ones stay; every sum is right, whoever's has moved."""
    import collective_core.torch as hvd

    hvd.init()
    ways = {
        "all_reduce": dist.all_reduce,
        "async": lambda tensor: dist.all_reduce(tensor, async_op=True).wait(),
        "allreduce_": lambda tensor: hvd.allreduce_(tensor, op=hvd.Sum),
        "allreduce_async_": lambda tensor: hvd.synchronize(hvd.allreduce_async_(tensor, op=hvd.Sum)),
        "grouped_allreduce_": lambda tensor: hvd.grouped_allreduce_([tensor, torch.ones(3)], op=hvd.Sum),
    }
    moved, wrong = {}, []
    for name, reduce in ways.items():
        with_array, array = torch.empty(70_001), None
        if rank == 0:
            array = with_array.numpy()
        small, part = torch.empty(1000), torch.empty(2, 70_001)[1]
        kept = {"array": with_array, "shared": torch.empty(70_001).share_memory_(), "small": small, "part": part}
        tensors = {"plain": torch.empty(70_001), **kept, "grid": torch.empty(300, 200)}
        seen = {which: tensor.view(-1)[3:5] for which, tensor in tensors.items()}
        for turn in range(5):
            where = {which: is_in_arena(tensor) for which, tensor in tensors.items()}
            for which, tensor in tensors.items():
                tensor.fill_(float(turn + rank))
                reduce(tensor)
                total = float(size * turn + sum(range(size)))
                known = [tensor.unique().tolist(), seen[which].tolist(), [float(array[7])] if which == "array" and rank == 0 else [total]]
                if known != [[total], [total, total], [total]]:
                    wrong.append((name, which, turn, known))
            moved[name] = [which for which in tensors if is_in_arena(tensors[which])]
            if turn < 2 and any(where.values()):
                wrong.append((name, turn, where))
        del tensors, kept, seen, tensor, with_array, small, part
    return {"wrong": wrong, "moved": moved, "left": left_blocks(), "ddp": ddp(), "views": ddp(as_views=True)}


def timed_out():
    """The last rank stands still in a sum until the first has given it up, whose tensor is the program's again."""
    tensor = allocate(16 << 20)
    address, pids = tensor.data_ptr(), torch.zeros(size, dtype=torch.int64)
    pids[rank] = os.getpid()
    dist.all_reduce(pids)

    def stop():
        time.sleep(0.5)
        os.kill(int(pids[-1]), signal.SIGSTOP)
        time.sleep(4.0)  # longer than the timeout
        os.kill(int(pids[-1]), signal.SIGCONT)

    stopping = threading.Thread(target=stop)
    if rank == 0:
        stopping.start()
    error = ""
    try:
        while True:
            tensor.fill_(1.0)
            dist.all_reduce(tensor)
    except RuntimeError as failure:
        error = str(failure)
    tensor.fill_(7.0)
    if rank == 0:
        stopping.join()
    time.sleep(0.5)
    unchanged = bool((tensor == 7.0).all())
    del tensor
    again = allocate(16 << 20)
    return {"error": error, "unchanged": unchanged, "again": again.data_ptr() == address, "arena": is_in_arena(again)}


def left_blocks():
    """Those that stay when nothing uses them: not what only waits for the collector, or for the thread that completes futures."""
    end = time.monotonic() + 5
    while gc.collect() >= 0 and memory._blocks and time.monotonic() < end:
        time.sleep(0.01)
    return len(memory._blocks)


def all_of_it():
    fp16 = dist.BuiltinCommHookType.FP16_COMPRESS
    of_ddp = {
        "plain": ddp(),
        "beside": ddp(overlaps=True),
        "views": ddp(as_views=True),
        "unused": ddp(find_unused_parameters=True),
        "static": ddp(static_graph=True),
        "fp16": ddp(hook=fp16),
    }
    report = {
        "wrong": same_bits(),
        **fsdp(),
        "ddp": of_ddp,
        "sparse": sparse(),
        "several": several(),
        **blocks(),
        "left": left_blocks(),
    }
    old = allocate(1000)
    old.fill_(float(rank))
    dist.destroy_process_group()
    old += 1
    dist.init_process_group("collective")
    global group
    group = dist.group.WORLD
    dist.all_reduce(old)
    return {**report, "later": old.unique().tolist(), "ddp_again": ddp()}


common.report(**{"all": all_of_it, "adopted": adopted, "timeout": timed_out}[sys.argv[1]]())
if sys.argv[1] == "timeout":
    os._exit(0)  # MPI_Finalize would wait for the other rank
dist.destroy_process_group()
