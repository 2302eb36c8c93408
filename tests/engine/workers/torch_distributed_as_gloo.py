"""What Gloo does and PyTorch's own tests ask for, of the backend `collective`. Two ranks; reports what went wrong, by case."""

import contextlib
import traceback
import weakref

import common
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _time_estimator
from torch.distributed.fsdp._fully_shard._fsdp_collectives import ProcessGroupAllocMixin
from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

dist.init_process_group("collective")
rank, size = dist.get_rank(), dist.get_world_size()
group, cpu = dist.group.WORLD, torch.device("cpu")


def zeros_without_memory():
    """Autograd makes such tensors."""
    zero, gathered, part, mine = torch._efficientzerotensor(2), torch.ones(2 * size), torch.ones(1), torch._efficientzerotensor(4)
    dist.all_reduce(zero)
    dist.broadcast(zero, 0)
    dist.all_gather_into_tensor(gathered, zero)
    dist.reduce_scatter_tensor(part, mine[:size])
    assert not zero.any()
    assert not gathered.any()
    assert not part.any()
    sent = torch._efficientzerotensor(2) if rank else torch.ones(2)
    received = torch.zeros(2)
    for work in (dist.isend(sent, 1 - rank), dist.irecv(received, 1 - rank)):
        work.wait()
    assert received.tolist() == ([1.0, 1.0] if rank else [0.0, 0.0])


def a_parameter_with_views_is_replicated():
    parameter = torch.ones(2 * size, requires_grad=True)
    mine = parameter.split(2)[rank]
    distribute_tensor(parameter, init_device_mesh("cpu", (size,)), [Replicate()])
    (mine * 3).sum().backward()
    assert parameter.grad.sum() == 6
    spread = torch.ones(2, 2, requires_grad=True)
    row = spread.unbind(1)[0]
    dist.broadcast(spread.t()[:1], 0)  # not in place: its memory has gaps
    row.sum().backward()
    assert spread.grad.sum() == 2


def what_pytorch_asks_a_backend():
    with contextlib.suppress(NotImplementedError), _time_estimator(group, cpu):
        raise AssertionError("it estimates no times")
    assert ProcessGroupAllocMixin(group).allocate([2, 3], dtype=torch.float32, device=cpu).numel() == 6
    assert not group._get_backend(cpu).supports_coalescing
    begun = group._get_sequence_number_for_group()
    dist.barrier()
    dist.all_reduce(torch.ones(1))
    assert group._get_sequence_number_for_group() == begun + 2
    group.get_group_store().set(f"from {rank}", "set")
    assert group.get_group_store().get(f"from {1 - rank}") == b"set"


def operations_after_a_body_that_raised_are_not_kept():
    """PyTorch leaves its _coalescing_manager without telling the group."""
    group._start_coalescing(cpu)
    for asynchronous in (False, True):
        tensor = torch.ones(2)
        work = dist.all_reduce(tensor, async_op=asynchronous)
        if work is not None:
            work.wait()
        there = weakref.ref(tensor)
        del tensor, work
        assert there() is None
    group._start_coalescing(cpu)
    tensor = torch.ones(2)
    dist.all_reduce(tensor, async_op=True)
    group._end_coalescing(cpu).wait()
    assert tensor.tolist() == [float(size)] * 2


wrong = {}
for case in (
    zeros_without_memory,
    a_parameter_with_views_is_replicated,
    what_pytorch_asks_a_backend,
    operations_after_a_body_that_raised_are_not_kept,
):
    try:
        case()
    except Exception:  # noqa: BLE001 - the test is told
        wrong[case.__name__] = traceback.format_exc()[-400:]
    dist.barrier()
dist.destroy_process_group()
common.report(wrong=wrong)
