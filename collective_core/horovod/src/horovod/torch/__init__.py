"""``import horovod.torch as hvd``."""

from collective_core.torch import *  # noqa: F403
from horovod.torch import elastic as elastic  # type: ignore[no-redef]
from horovod.torch import mpi_ops as mpi_ops
