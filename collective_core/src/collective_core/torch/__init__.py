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

_EXTENSIONS = "collective_core.extensions"
__getattr__, __dir__ = lazy.attributes(
    __name__,
    {
        "DiLoCo": f"{_EXTENSIONS}.slow_networks:DiLoCo",
        "LocalSGD": f"{_EXTENSIONS}.slow_networks:LocalSGD",
        "data": f"{_EXTENSIONS}.streaming",
        "elastic": "collective_core.torch.elastic",
        "nn": f"{_EXTENSIONS}.sparse",
        "plan_communication": f"{_EXTENSIONS}.slow_networks:plan_communication",
        "ps": f"{_EXTENSIONS}.ps",
    },
)

__all__ = ["DiLoCo", "LocalSGD", "data", "elastic", "nn", "plan_communication", "ps"]
__all__ += mpi_ops.__all__
