"""DistributedOptimizer: the steps, and the gradients that are reduced before them."""

from __future__ import annotations

from collective_core.torch.optimizer.distributed_optimizer import DistributedOptimizer as DistributedOptimizer
from collective_core.torch.optimizer.distributed_optimizer import _DistributedOptimizer as _DistributedOptimizer
from collective_core.torch.optimizer.gradient_scaling import GradScaler as GradScaler
