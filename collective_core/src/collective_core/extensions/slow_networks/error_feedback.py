"""Sums of an optimizer's buckets that travel compressed (compressed.py), and what this rank has not sent yet.

That is kept by parameter, because buckets change. It belongs to this rank: it is in the optimizer's state with the rank's number, and no
broadcast takes it to another rank; PowerSGD's factors are the same on all ranks and go with the rest of the state.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Sequence

import numpy as np
import torch

from collective_core.extensions.slow_networks import compressed
from collective_core.extensions.slow_networks.communication import as_matrix
from collective_core.runtime import membership
from collective_core.runtime.process_sets import members_of
from collective_core.torch import handles
from collective_core.torch.compression import LossyCompression, PowerSGD, TopK
from collective_core.torch.ops.allreduce import Sum, allreduce_async_
from collective_core.torch.optimizer.buckets import Bucket

#: Types of gradients that travel compressed, as float32: it holds their values.
_COMPRESSED = (torch.float16, torch.bfloat16, torch.float32)


class ErrorFeedback:
    """Reduces buckets as ``compression`` says. ``how``: the keyword arguments of an allreduce."""

    def __init__(self, compression: LossyCompression, how: dict[str, Any]) -> None:
        self._compression, self._how = compression, how
        self._residuals: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._factors: dict[torch.nn.Parameter, torch.Tensor] = {}

    def reduce(self, buckets: Sequence[Bucket]) -> None:
        """Blocks; all buckets' sums travel at the same time. Other types, such as float64, are summed whole."""
        lossy = [bucket for bucket in buckets if bucket.flat.dtype in _COMPRESSED]
        for bucket in buckets:
            bucket.mark()
        whole = [(b.name, b.flat, self._how) for b in buckets if b.flat.dtype not in _COMPRESSED]
        how = {"op": Sum, "process_set": self._how["process_set"]}
        used_parameters = [(f"{b.name}.used_parameters", b.used_parameters, how) for b in lossy]
        started = [allreduce_async_(tensor, name=name, **how) for name, tensor, how in [*whole, *used_parameters]]
        with torch.no_grad():
            factors = [self._factors_of(bucket) for bucket in lossy]
            steps = [self._steps(bucket, bucket_factors) for bucket, bucket_factors in zip(lossy, factors)]
            means, *_ = handles.results_of([partial(compressed.run, steps), *(partial(handles.synchronize, each) for each in started)])
            ranks = members_of(self._how["process_set"]).size if self._how["op"] == Sum else 1
            for bucket, mean in zip(lossy, means):
                bucket.flat[: bucket.gradients].copy_(mean.values * ranks)
            # All ranks see the same. A GradScaler leaves out a step that is not finite: what was to be sent before it still is.
            if all(bool(torch.isfinite(bucket.flat).all()) for bucket in buckets):
                for bucket, mean, bucket_factors in zip(lossy, means, factors):
                    self._take(bucket, mean, bucket_factors)

    def _steps(self, bucket: Bucket, factors: list[torch.Tensor | None]) -> compressed.Steps:
        values = bucket.flat[: bucket.gradients].to(torch.float32, copy=True)
        for parameter, part in zip(bucket.parameters, values.split(_lengths(bucket))):
            if parameter in self._residuals:
                part += self._residuals[parameter]
        process_set = self._how["process_set"]
        if isinstance(self._compression, PowerSGD):
            shapes = [as_matrix(parameter.shape, self._compression.rank) for parameter in bucket.parameters]
            return compressed.low_rank(values, shapes, factors, bucket.name, process_set)
        if isinstance(self._compression, TopK):
            return compressed.top_k(values, self._compression.ratio, bucket.name, process_set)
        return compressed.quantized(values, 8, bucket.name, process_set)

    def _factors_of(self, bucket: Bucket) -> list[torch.Tensor | None]:
        """Of each parameter: PowerSGD's from the last step, or signs drawn from its place, which are the same on all ranks."""
        if not isinstance(self._compression, PowerSGD):
            return []
        factors: list[torch.Tensor | None] = []
        for number, parameter in enumerate(bucket.parameters):
            _, columns = as_matrix(parameter.shape, self._compression.rank)
            if columns and parameter not in self._factors:
                signs = np.random.default_rng(number).integers(0, 2, (columns, self._compression.rank)) * 2 - 1
                self._factors[parameter] = torch.from_numpy(signs).to(parameter.device, torch.float32)
            factors.append(self._factors.get(parameter))
        return factors

    def _take(self, bucket: Bucket, mean: compressed.Mean, factors: list[torch.Tensor | None]) -> None:
        """Only when the whole step's operations have succeeded: otherwise what was to be sent still is."""
        is_used = bucket.is_used()
        for parameter, used, residual in zip(bucket.parameters, is_used, mean.residual.split(_lengths(bucket))):
            if not used and parameter in self._residuals:
                # Its mean goes nowhere. A copy: the old one would keep the memory of a whole bucket.
                residual.copy_(self._residuals[parameter])
            self._residuals[parameter] = residual
        for parameter, used, factor in zip(bucket.parameters, is_used, factors):
            if used and factor is not None:
                self._factors[parameter] = factor

    def state(self, parameters: Sequence[torch.nn.Parameter]) -> dict[str, Any]:
        """For the optimizer's state_dict: ``factors`` and this rank's ``residuals`` by the parameters' numbers."""
        numbers = {parameter: number for number, parameter in enumerate(parameters)}
        own = {numbers[p]: residual for p, residual in self._residuals.items() if p in numbers}
        factors = {numbers[p]: factor for p, factor in self._factors.items() if p in numbers}
        return {"factors": factors, "residuals": own, "rank": _rank()}

    def load(self, state: dict[str, Any], parameters: Sequence[torch.nn.Parameter]) -> None:
        """What :meth:`state` has returned. Another rank's residuals are not taken: this rank begins without; without any its own stay."""
        self._factors = _by_parameter(state["factors"], parameters)
        if "residuals" in state:
            self._residuals = _by_parameter(state["residuals"], parameters) if state["rank"] == _rank() else {}


def _rank() -> int | None:
    return membership.rank() if membership.is_initialized() else None


def _by_parameter(tensors: dict[int, torch.Tensor], parameters: Sequence[torch.nn.Parameter]) -> dict[torch.nn.Parameter, torch.Tensor]:
    return {parameters[number]: tensor.to(parameters[number].device, copy=True) for number, tensor in tensors.items()}


def _lengths(bucket: Bucket) -> list[int]:
    return [parameter.numel() for parameter in bucket.parameters]
