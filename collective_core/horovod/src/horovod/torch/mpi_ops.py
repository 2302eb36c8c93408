"""The collectives, as ``horovod.torch`` has them."""

from collective_core.torch.mpi_ops import *  # noqa: F403
