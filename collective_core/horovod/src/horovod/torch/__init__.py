"""``import horovod.torch as hvd``."""

from typing import TYPE_CHECKING

from collective_core import lazy
from collective_core.torch import OPTIONAL
from collective_core.torch import __all__ as __all__
from collective_core.torch.mpi_ops import *  # noqa: F403
from horovod.torch import mpi_ops as mpi_ops

if TYPE_CHECKING:
    from collective_core.torch import *  # noqa: F403
else:
    __getattr__, __dir__ = lazy.attributes(__name__, {**OPTIONAL, "elastic": "horovod.torch.elastic"})
