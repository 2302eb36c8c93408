"""Reductions of a group: allreduce, reduce, reduce-scatter; of real, complex and sparse tensors."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Callable

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from collective_core import _native
from collective_core.torch.backend.exchanges import gather_equal
from collective_core.torch.backend.operations import options_of
from collective_core.torch.backend.reducers import is_of_reducer
from collective_core.torch.backend.tensors import as_real, copy_back, copy_into, listed, on_host
from collective_core.torch.backend.work import GroupWork
from collective_core.torch.tensors import EXCHANGE_API, PLAIN, adopt_again, raise_versions
from collective_core_autoload import NAME

if TYPE_CHECKING:
    from collective_core.torch.backend.group import CollectiveGroup

_REDUCTIONS = {
    dist.ReduceOp.SUM: _native.SUM,
    dist.ReduceOp.AVG: _native.AVERAGE,
    dist.ReduceOp.MIN: _native.MIN,
    dist.ReduceOp.MAX: _native.MAX,
    dist.ReduceOp.PRODUCT: _native.PRODUCT,
}
_BITWISE: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}
#: Reductions that a complex number's two parts do one by one.
_BY_PARTS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)


def allreduce(group: CollectiveGroup, tensors: Any, opts: Any = None) -> GroupWork:
    opts, tensors = options_of(opts, c10d.AllreduceOptions), listed(tensors)
    of_reducer = getattr(opts, "asyncOp", False) and is_of_reducer()
    if of_reducer:
        for tensor in tensors:
            group.reducers.take(group, tensor)
        # With other groups, of any backend, ranks may come to their collectives and to full buckets in different orders.
        opts.asyncOp = group.reducers.overlap or len(dist.distributed_c10d._world.pg_map) > 1
    reduce = _REDUCTIONS.get(_kind_of(opts.reduceOp)) if EXCHANGE_API and not getattr(opts, "asyncOp", True) else None
    if reduce is None or len(tensors) != 1:
        for tensor in () if of_reducer else tensors:
            adopt_again(tensor)
        return group.operations.group_of([_allreduce(group, tensor, opts) for tensor in tensors])
    (tensor,) = tensors
    if not group.operations.run_prepared(tensor, reduce):
        return _allreduce(group, tensor, opts, prepare=of_reducer or adopt_again(tensor))
    raise_versions(tensors)
    return group.operations.done(tensors)


def allreduce_coalesced(group: CollectiveGroup, tensors: Any, opts: Any = None) -> GroupWork:
    return allreduce(group, tensors, opts)


def _allreduce(
    group: CollectiveGroup, tensor: torch.Tensor, opts: Any, target: torch.Tensor | None = None, prepare: bool = False
) -> GroupWork:
    target = tensor if target is None else target
    if tensor.is_sparse:
        return _sum_sparse(group, tensor, opts)
    if _kind_of(opts.reduceOp) in _BITWISE and (tensor.is_floating_point() or tensor.is_complex()):
        return group.operations.refused("all_reduce", f"{tensor.dtype} has no {_name_of(opts.reduceOp)}", opts)
    if _kind_of(opts.reduceOp) in _BITWISE:
        return _reduce_gathered(group, tensor, target, _BITWISE[_kind_of(opts.reduceOp)], opts)
    source, reduce, scale, problem = _prepared(tensor, opts.reduceOp)
    result = source if target is tensor else torch.empty_like(source)
    operation = group.operations.operation(_native.ALLREDUCE, "all_reduce", source, result, problem, reduce=reduce, prescale=scale)
    work = group.operations.start(operation, opts, [target], partial(copy_back, result, target), source)
    if prepare and type(tensor) in PLAIN and source.data_ptr() == tensor.data_ptr() and not tensor.is_complex():
        group.operations.prepare(tensor, reduce, operation, "all_reduce")
    return work


def reduce(group: CollectiveGroup, tensors: Any, opts: Any = None, op: Any = dist.ReduceOp.SUM) -> GroupWork:
    opts = options_of(opts, c10d.ReduceOptions, op)
    is_root = group.rank() == opts.rootRank
    return group.operations.group_of(
        [_allreduce(group, tensor, opts, tensor if is_root else torch.empty_like(tensor)) for tensor in listed(tensors)]
    )


def reduce_scatter(group: CollectiveGroup, outputs: Any, inputs: Any, opts: Any = None) -> GroupWork:
    opts, of_one = options_of(opts, c10d.ReduceScatterOptions), torch.is_tensor(outputs)
    pairs = [(outputs, inputs)] if of_one else zip(outputs, inputs)
    return group.operations.group_of([_reduce_scatter_list(group, output, parts, opts) for output, parts in pairs])


def _reduce_scatter_list(group: CollectiveGroup, output: torch.Tensor, parts: list[torch.Tensor], opts: Any) -> GroupWork:
    if len(parts) != group.size() or parts[group.rank()].numel() != output.numel():
        problem = f"{len(parts)} parts cannot be scattered on {group.size()} ranks, or this one's has not {output.numel()} elements"
        return group.operations.refused("reduce_scatter", problem, opts)
    if len({part.numel() for part in parts}) == 1:
        return _reduce_scatter(group, output, torch.stack([part.reshape(-1) for part in parts]), opts)
    # Parts of different lengths: their sum in one, of which each rank takes its own.
    flat = torch.cat([part.reshape(-1) for part in parts])
    begin = sum(part.numel() for part in parts[: group.rank()])
    work = _allreduce(group, flat, opts)
    return group.operations.then(work, [output], lambda: copy_into(output, flat[begin : begin + output.numel()].view(output.shape)))


def _reduce_scatter_base(group: CollectiveGroup, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> GroupWork:
    return _reduce_scatter(group, output, source, options_of(opts, c10d.ReduceScatterOptions))


def reduce_scatter_tensor_coalesced(
    group: CollectiveGroup, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
) -> GroupWork:
    opts = options_of(opts, c10d.ReduceScatterOptions)
    return group.operations.group_of([_reduce_scatter(group, output, source, opts) for output, source in zip(outputs, inputs)])


def _reduce_scatter(group: CollectiveGroup, output: torch.Tensor, whole: torch.Tensor, opts: Any) -> GroupWork:
    if _kind_of(opts.reduceOp) in _BITWISE:
        summed = torch.empty_like(whole)
        work = _reduce_gathered(group, whole, summed, _BITWISE[_kind_of(opts.reduceOp)], opts)
        return group.operations.then(
            work, [output], lambda: copy_into(output, summed.view(group.size(), -1)[group.rank()].view(output.shape))
        )
    source, reduce, scale, problem = _prepared(whole, opts.reduceOp)
    if output.numel() * group.size() != whole.numel() or output.dtype != whole.dtype:
        problem = f"{whole.numel()} elements of {whole.dtype} cannot be scattered into {output.numel()} of {output.dtype} on each rank"
        source = source.new_zeros(group.size())
    rows = source.reshape(group.size(), -1)
    target = as_real(on_host(output))
    operation = group.operations.operation(_native.REDUCESCATTER, "reduce_scatter", rows, target, problem, reduce=reduce, prescale=scale)
    return group.operations.start(operation, opts, [output], partial(copy_back, target, output), rows)


def _prepared(tensor: torch.Tensor, op: Any) -> tuple[torch.Tensor, int, float, str]:
    """What the engine reads, its reduction, the factor before it, and why it cannot (empty: it can)."""
    source, kind = on_host(tensor), _kind_of(op)
    if tensor.is_complex():
        source = as_real(source)
        if kind not in _BY_PARTS:
            return source, _native.SUM, 1.0, f"complex tensors have no {_name_of(op)}"
    if kind in _REDUCTIONS:
        return source, _REDUCTIONS[kind], 1.0, ""
    if kind == dist.ReduceOp.PREMUL_SUM:
        return source, _native.SUM, float(op.factor if hasattr(op, "factor") else op.__getstate__()[1]), ""
    return source, _native.SUM, 1.0, f"the backend {NAME} has no reduction {_name_of(op)}"


def _reduce_gathered(
    group: CollectiveGroup, tensor: torch.Tensor, target: torch.Tensor, combine: Callable[..., torch.Tensor], opts: Any
) -> GroupWork:
    everyone = torch.empty(group.size(), *tensor.shape, dtype=tensor.dtype)
    work = gather_equal(group, everyone, tensor, opts)

    def finish() -> None:
        result = everyone[0]
        for other in everyone[1:]:
            result = combine(result, other)
        copy_into(target, result)

    return group.operations.then(work, [target], finish)


def _sum_sparse(group: CollectiveGroup, tensor: torch.Tensor, opts: Any) -> GroupWork:
    if _kind_of(opts.reduceOp) != dist.ReduceOp.SUM:
        return group.operations.refused("all_reduce", f"sparse tensors have no {_name_of(opts.reduceOp)}", opts)
    own = tensor.detach().coalesce().cpu()
    indices, values = own.indices().t().contiguous(), own.values().contiguous()
    if indices.numel() == 0:
        indices, values = indices.reshape(0, own.sparse_dim()), values.reshape(0, *own.shape[own.sparse_dim() :])
    of_indices = group.operations.gather_rows(indices, opts)
    of_values = group.operations.gather_rows(values, opts)

    def finish() -> None:
        total = torch.sparse_coo_tensor(of_indices.rows.t(), of_values.rows, tensor.shape).coalesce()
        with torch.no_grad():
            tensor.copy_(total)

    return group.operations.then(group.operations.group_of([of_indices.work, of_values.work]), [tensor], finish)


def _kind_of(op: Any) -> Any:
    return getattr(op, "op", op)


def _name_of(op: Any) -> str:
    return str(_kind_of(op)).rsplit(".", 1)[-1]
