"""The engine for PyTorch, with Horovod's interface: ``import collective_core.torch as hvd``.

    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

docs/horovod.md lists what differs from Horovod.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from collective_core.torch import requirement as requirement  # isort: skip - says what is missing
from collective_core import lazy
from collective_core.common.interface import *  # noqa: F403
from collective_core.torch import mpi_ops
from collective_core.torch.mpi_ops import *  # noqa: F403

if TYPE_CHECKING:
    from collective_core.extensions import ps
    from collective_core.extensions import sparse as nn
    from collective_core.extensions import streaming as data
    from collective_core.extensions.slow_networks import DiLoCo, LocalSGD, plan_communication
    from collective_core.torch import elastic

#: Names that are imported when somebody asks for them, and where they are.
OPTIONAL = {"elastic": "collective_core.torch.elastic", "data": "collective_core.extensions.streaming"}
OPTIONAL |= {"nn": "collective_core.extensions.sparse", "ps": "collective_core.extensions.ps"}
OPTIONAL |= {name: f"collective_core.extensions.slow_networks:{name}" for name in ("DiLoCo", "LocalSGD", "plan_communication")}
if not TYPE_CHECKING:  # for which every name would be there
    __getattr__, __dir__ = lazy.attributes(__name__, OPTIONAL)

__all__ = ["DiLoCo", "LocalSGD", "data", "elastic", "nn", "plan_communication", "ps"]
__all__ += mpi_ops.__all__
