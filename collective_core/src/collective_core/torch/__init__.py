"""The engine for PyTorch, with Horovod's interface: ``import collective_core.torch as hvd``.

    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

docs/horovod.md lists what differs from Horovod.
"""

from collective_core.torch import requirement as requirement  # isort: skip - says what is missing
from collective_core.common.interface import *  # noqa: F403
from collective_core.torch.mpi_ops import *  # noqa: F403
from collective_core.torch.mpi_ops import __all__ as __all__
