"""Reductions of a group: allreduce, reduce, reduce-scatter; of real, complex and sparse tensors."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from collective_core import _native
from collective_core.torch.compiling import untraced
from collective_core.torch.distributed.cuda import on_its_device
from collective_core.torch.distributed.exchanges import Exchanges
from collective_core.torch.distributed.operations import options_of
from collective_core.torch.distributed.tensors import as_real, bring_home, copy_into, listed, on_host
from collective_core.torch.distributed.work import Work
from collective_core_autoload import NAME

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


@untraced
class Reductions(Exchanges):
    """Options are those of torch.distributed; ``asyncOp`` false: the operation has ended when the call returns."""

    @on_its_device
    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        opts = options_of(opts, c10d.AllreduceOptions)
        return self._group_of([self._allreduce(tensor, opts) for tensor in listed(tensors)])

    @on_its_device
    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Work:
        return self.allreduce(tensors, opts)

    def _allreduce(self, tensor: torch.Tensor, opts: Any, target: torch.Tensor | None = None) -> Work:
        target = tensor if target is None else target
        if tensor.is_sparse:
            return self._sum_sparse(tensor, opts)
        if _kind_of(opts.reduceOp) in _BITWISE and (tensor.is_floating_point() or tensor.is_complex()):
            return self._refused("all_reduce", f"{tensor.dtype} has no {_name_of(opts.reduceOp)}", opts)
        if _kind_of(opts.reduceOp) in _BITWISE:
            return self._reduce_gathered(tensor, target, _BITWISE[_kind_of(opts.reduceOp)], opts)
        source, reduce, scale, problem = self._prepared(tensor, opts.reduceOp)
        result = source if target is tensor else torch.empty_like(source)
        operation = self._operation(_native.ALLREDUCE, "all_reduce", source, result, problem, reduce=reduce, prescale=scale)
        return self._start(operation, opts, [target], partial(bring_home, result, target), source)

    @on_its_device
    def reduce(self, tensors: Any, opts: Any = None, op: Any = dist.ReduceOp.SUM) -> Work:
        opts = options_of(opts, c10d.ReduceOptions, op)
        is_root = self._me == opts.rootRank
        return self._group_of(
            [self._allreduce(tensor, opts, tensor if is_root else torch.empty_like(tensor)) for tensor in listed(tensors)]
        )

    @on_its_device
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        opts, of_one = options_of(opts, c10d.ReduceScatterOptions), torch.is_tensor(outputs)
        pairs = [(outputs, inputs)] if of_one else zip(outputs, inputs)
        return self._group_of([self._reduce_scatter_list(output, parts, opts) for output, parts in pairs])

    def _reduce_scatter_list(self, output: torch.Tensor, parts: list[torch.Tensor], opts: Any) -> Work:
        if len(parts) != self._ranks or parts[self._me].numel() != output.numel():
            problem = f"{len(parts)} parts cannot be scattered on {self._ranks} ranks, or this one's has not {output.numel()} elements"
            return self._refused("reduce_scatter", problem, opts)
        if len({part.numel() for part in parts}) == 1:
            return self._reduce_scatter(output, torch.stack([part.reshape(-1) for part in parts]), opts)
        # Parts of different lengths: their sum in one, of which each rank takes its own.
        flat = torch.cat([part.reshape(-1) for part in parts])
        begin = sum(part.numel() for part in parts[: self._me])
        work = self._allreduce(flat, opts)
        return self._then(work, [output], lambda: copy_into(output, flat[begin : begin + output.numel()].view(output.shape)))

    @on_its_device
    def _reduce_scatter_base(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> Work:
        return self._reduce_scatter(output, source, options_of(opts, c10d.ReduceScatterOptions))

    reduce_scatter_single = _reduce_scatter_base

    @on_its_device
    def reduce_scatter_tensor_coalesced(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        opts = options_of(opts, c10d.ReduceScatterOptions)
        return self._group_of([self._reduce_scatter(output, source, opts) for output, source in zip(outputs, inputs)])

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _reduce_scatter(self, output: torch.Tensor, whole: torch.Tensor, opts: Any) -> Work:
        if _kind_of(opts.reduceOp) in _BITWISE:
            summed = torch.empty_like(whole)
            work = self._reduce_gathered(whole, summed, _BITWISE[_kind_of(opts.reduceOp)], opts)
            return self._then(work, [output], lambda: copy_into(output, summed.view(self._ranks, -1)[self._me].view(output.shape)))
        source, reduce, scale, problem = self._prepared(whole, opts.reduceOp)
        if output.numel() * self._ranks != whole.numel() or output.dtype != whole.dtype:
            problem = f"{whole.numel()} elements of {whole.dtype} cannot be scattered into {output.numel()} of {output.dtype} on each rank"
            source = source.new_zeros(self._ranks)
        rows = source.reshape(self._ranks, -1)
        target = as_real(on_host(output))
        operation = self._operation(_native.REDUCESCATTER, "reduce_scatter", rows, target, problem, reduce=reduce, prescale=scale)
        return self._start(operation, opts, [output], partial(bring_home, target, output), rows)

    def _prepared(self, tensor: torch.Tensor, op: Any) -> tuple[torch.Tensor, int, float, str]:
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

    def _reduce_gathered(self, tensor: torch.Tensor, target: torch.Tensor, combine: Callable[..., torch.Tensor], opts: Any) -> Work:
        everyone = torch.empty(self._ranks, *tensor.shape, dtype=tensor.dtype)
        work = self._gather_equal(everyone, tensor, opts)

        def finish() -> None:
            result = everyone[0]
            for other in everyone[1:]:
                result = combine(result, other)
            copy_into(target, result)

        return self._then(work, [target], finish)

    def _sum_sparse(self, tensor: torch.Tensor, opts: Any) -> Work:
        if _kind_of(opts.reduceOp) != dist.ReduceOp.SUM:
            return self._refused("all_reduce", f"sparse tensors have no {_name_of(opts.reduceOp)}", opts)
        own = tensor.detach().coalesce().cpu()
        indices, values = own.indices().t().contiguous(), own.values().contiguous()
        if indices.numel() == 0:
            indices, values = indices.reshape(0, own.sparse_dim()), values.reshape(0, *own.shape[own.sparse_dim() :])
        of_indices = self._gather_rows(indices, opts)
        of_values = self._gather_rows(values, opts)

        def finish() -> None:
            total = torch.sparse_coo_tensor(of_indices.rows.t(), of_values.rows, tensor.shape).coalesce()
            with torch.no_grad():
                tensor.copy_(total)

        return self._then(self._group_of([of_indices.work, of_values.work]), [tensor], finish)


def _kind_of(op: Any) -> Any:
    return getattr(op, "op", op)


def _name_of(op: Any) -> str:
    return str(_kind_of(op)).rsplit(".", 1)[-1]
