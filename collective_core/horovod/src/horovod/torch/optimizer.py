"""DistributedOptimizer."""

from collective_core.torch.optimizer import DistributedOptimizer as DistributedOptimizer
from collective_core.torch.optimizer import _DistributedOptimizer as _DistributedOptimizer
