"""Every function of the PyTorch interface inside a compiled function: it does there what it does outside, gradients included."""

import inspect
import os
import tempfile

import collective_core.torch as hvd
import common
import torch
import torch._dynamo

hvd.init()
rank, size = hvd.rank(), hvd.size()
torch.set_num_threads(1)


def sparse():
    return torch.sparse_coo_tensor([[0, rank]], [1.0, 2.0], [4]).coalesce()


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def distributed(x):
    model = torch.nn.Linear(2, 2)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer_of(model), model.named_parameters())
    model(x.detach().view(-1, 2)).sum().backward()
    optimizer.step()
    return [p.grad.clone() for p in model.parameters()]


def broadcast_state(x):
    model = torch.nn.Linear(2, 2)
    optimizer = optimizer_of(model)
    model(x.detach().view(-1, 2)).sum().backward()
    optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return optimizer.state_dict()["state"][1]["momentum_buffer"]


def with_process_set(x):
    members = hvd.add_process_set([0])
    known = sorted(hvd.get_process_set_ids_and_ranks().values())
    result = x if rank else hvd.allreduce(x, process_set=hvd.process_set_by_id(members.process_set_id))
    hvd.remove_process_set(members)
    return result, known


def with_timeline(x):
    with tempfile.TemporaryDirectory() as folder:
        hvd.start_timeline(os.path.join(folder, "timeline.json"))
        result = hvd.allreduce(x)
        hvd.stop_timeline()
    return result


def another_life(x):
    hvd.shutdown()
    was = hvd.is_initialized()
    hvd.init()
    return was, hvd.allreduce(x)


def polled(x):
    handle = hvd.allreduce_async(x)
    hvd.poll(handle)
    return hvd.synchronize(handle)


def pair(x):
    return [x, x + 1]


#: By the functions that each one calls; those of one tensor that has a gradient come first.
DIFFERENTIABLE = {
    "allreduce": lambda x: hvd.allreduce(x * 2),
    "allgather": lambda x: hvd.allgather(x * 2),
    "alltoall": lambda x: hvd.alltoall(x * 2),
    "broadcast": lambda x: hvd.broadcast(x * 2, 0),
    "reducescatter": lambda x: hvd.reducescatter(x * 2),
    "grouped_allreduce": lambda x: torch.cat(hvd.grouped_allreduce(pair(x))),
    "grouped_allgather": lambda x: torch.cat(hvd.grouped_allgather(pair(x))),
    "grouped_reducescatter": lambda x: torch.cat(hvd.grouped_reducescatter(pair(x))),
}
OTHERS = {
    "allreduce_": lambda x: hvd.allreduce_(x * 2),
    "broadcast_": lambda x: hvd.broadcast_(x * 2, 0),
    "grouped_allreduce_": lambda x: hvd.grouped_allreduce_([x * 2, x + 1]),
    "allreduce_async poll synchronize": polled,
    "allreduce_async_": lambda x: hvd.synchronize(hvd.allreduce_async_(x * 2)),
    "allgather_async": lambda x: hvd.synchronize(hvd.allgather_async(x)),
    "alltoall_async": lambda x: hvd.synchronize(hvd.alltoall_async(x)),
    "broadcast_async": lambda x: hvd.synchronize(hvd.broadcast_async(x, 0)),
    "broadcast_async_": lambda x: hvd.synchronize(hvd.broadcast_async_(x * 2, 0)),
    "reducescatter_async": lambda x: hvd.synchronize(hvd.reducescatter_async(x)),
    "grouped_allreduce_async": lambda x: hvd.synchronize(hvd.grouped_allreduce_async(pair(x))),
    "grouped_allreduce_async_": lambda x: hvd.synchronize(hvd.grouped_allreduce_async_([x * 2, x + 1])),
    "grouped_allgather_async": lambda x: hvd.synchronize(hvd.grouped_allgather_async(pair(x))),
    "grouped_reducescatter_async": lambda x: hvd.synchronize(hvd.grouped_reducescatter_async(pair(x))),
    "sparse_allreduce_async": lambda x: hvd.synchronize(hvd.sparse_allreduce_async(sparse(), "sparse")).to_dense() + x[:4],
    "barrier": lambda x: (hvd.barrier(), x + 1)[1],
    "join": lambda x: (hvd.join(), x + 1)[1],
    "broadcast_object": lambda x: (hvd.broadcast_object({"rank": rank}, 0), x + 1),
    "broadcast_object_fn": lambda x: (hvd.broadcast_object_fn(0)({"rank": rank} if rank == 0 else None), x + 1),
    "allgather_object": lambda x: (hvd.allgather_object(rank), x + 1),
    "broadcast_parameters DistributedOptimizer": distributed,
    "broadcast_optimizer_state": broadcast_state,
    "add_process_set remove_process_set process_set_by_id get_process_set_ids_and_ranks": with_process_set,
    "start_timeline stop_timeline": with_timeline,
    "init shutdown is_initialized": another_life,
    "metrics": lambda x: (bool(hvd.metrics()), x + 1),
    "compare_steps": lambda x: (hvd.compare_steps(3), x + 1),
    "plan_communication": lambda x: (bool(str(hvd.plan_communication(torch.nn.Linear(2, 2)))), x + 1),
    "sample_weight": lambda x: hvd.sample_weight(2) * x,
}
PLACES = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "is_homogeneous")
for name in (*PLACES, *(name for name in hvd.__all__ if name.endswith(("_built", "_enabled", "_supported")))):
    OTHERS[name] = lambda x, name=name: (getattr(hvd, name)(), x + 1)

public = {name for name in hvd.__all__ if inspect.isroutine(getattr(hvd, name))}
called = {name for names in (*DIFFERENTIABLE, *OTHERS) for name in names.split()}
assert public == called, f"of the public functions, {public ^ called} are not in the tables above, or are in them alone"


def flat(result):
    """All tensors of a result, and the rest of it."""
    if isinstance(result, (tuple, list)):
        return [part for each in result for part in flat(each)]
    return [result]


def compare(what, got, want):
    assert len(got) == len(want), what
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other) if torch.is_tensor(one) else one == other, f"{what}: {one}, not {other}"


def made_of(operation, has_gradient):
    """What the operation gives of the same numbers every time, and the gradient where there is one."""
    torch.manual_seed(0)
    x = (torch.arange(4.0 * size) + rank).requires_grad_(has_gradient)
    result = flat(operation(x.sin()))
    if has_gradient:
        result[0].square().sum().backward()
        result.append(x.grad)
    return [part.detach() if torch.is_tensor(part) else part for part in result]


for has_gradient, operations in ((True, DIFFERENTIABLE), (False, OTHERS)):
    for name, operation in operations.items():

        def between(x, operation=operation):
            return operation(x * 3)

        torch._dynamo.reset()
        want = made_of(between, has_gradient)
        compare(name, made_of(torch.compile(between, backend="eager"), has_gradient), want)
common.report(done=True)
