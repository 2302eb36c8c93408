"""Batch normalisation over the samples of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from collective_core.arrays import Sum
from collective_core.runtime.process_sets import ProcessSet, members_of
from collective_core.torch.compiling import not_compiled
from collective_core.torch.ops.allgather import allgather
from collective_core.torch.ops.allreduce import allreduce


class SyncBatchNorm(_BatchNorm):
    """``torch.nn.BatchNorm*d`` with mean and variance over the batches of all ranks of ``process_set`` while training.

    Batches may have different sizes, and ranks that have joined do not count. Input: (samples, channels, ...).
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        use_batch = self.training or self.running_mean is None
        normalised: torch.Tensor = self._normalise_together(input) if use_batch else super().forward(input)
        return normalised

    @not_compiled
    def _normalise_together(self, input: torch.Tensor) -> torch.Tensor:
        if members_of(self.process_set).size == 1:
            alone: torch.Tensor = super().forward(input)
            return alone
        output, mean, variance, count = _SyncBatchNorm.apply(input, self.weight, self.bias, self.eps, self.process_set)
        if self.training and self.track_running_stats and count:  # an empty batch on all ranks has no statistics
            self._track(mean, variance, float(count))
        normalised: torch.Tensor = output
        return normalised

    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: float) -> None:
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            unbiased = variance * (count / max(count - 1.0, 1.0))
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


class _SyncBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, process_set: ProcessSet | None
    ) -> Any:
        axes = [axis for axis in range(x.dim()) if axis != 1]
        shape = [1, -1] + [1] * (x.dim() - 2)
        wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
        samples = x.numel() // x.shape[1]
        local_mean = wide.mean(axes) if samples else wide.new_zeros(x.shape[1])
        local_square = (wide - local_mean.view(shape)).square().sum(axes)
        # (count, mean, sum of squared deviations) of every rank, merged without the cancellation of E[x²] - E[x]².
        row = torch.cat([wide.new_tensor([float(samples)]), local_mean, local_square]).unsqueeze(0)
        counts, means, squares = allgather(row, process_set=process_set).split([1, x.shape[1], x.shape[1]], dim=1)
        count = counts.sum()
        total = count.clamp(min=1.0)
        mean = (counts * means).sum(0) / total
        variance = (squares + counts * (means - mean).square()).sum(0) / total
        inverse = (variance + eps).rsqrt()
        normal = (wide - mean.view(shape)) * inverse.view(shape)
        output = normal if weight is None else normal * weight.view(shape)
        output = output if bias is None else output + bias.view(shape)
        ctx.save_for_backward(x, mean, inverse, total, weight)
        ctx.axes, ctx.shape, ctx.eps, ctx.process_set = axes, shape, eps, process_set
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(x.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, mean, inverse, total, weight = ctx.saved_tensors
        wide, shape = x.to(mean.dtype), ctx.shape
        if torch.is_grad_enabled():  # a second derivative needs how mean and variance depend on the batches
            mean = allreduce(wide.sum(ctx.axes), op=Sum, process_set=ctx.process_set) / total
            squares = (wide - mean.view(shape)).square().sum(ctx.axes)
            inverse = (allreduce(squares, op=Sum, process_set=ctx.process_set) / total + ctx.eps).rsqrt()
        normal = (wide - mean.view(shape)) * inverse.view(shape)
        gradient = gradients[0].to(wide.dtype)
        # Gradients of weight and bias stay local: the optimizer averages them as it does all others.
        of_weight = (gradient * normal).sum(ctx.axes)
        of_bias = gradient.sum(ctx.axes)
        if weight is not None:
            gradient = gradient * weight.view(shape)
        sums = torch.stack([gradient.sum(ctx.axes), (gradient * normal).sum(ctx.axes)])
        mean_gradient, mean_product = (allreduce(sums, op=Sum, process_set=ctx.process_set) / total).unbind(0)
        centred = gradient - mean_gradient.view(shape) - normal * mean_product.view(shape)
        of_input = (centred * inverse.view(shape)).to(gradients[0].dtype)
        return (
            of_input,
            of_weight.to(weight.dtype) if weight is not None else None,
            of_bias.to(ctx.bias_dtype) if ctx.bias_dtype is not None else None,
            None,
            None,
        )
