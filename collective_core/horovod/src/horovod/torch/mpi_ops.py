"""The collectives, as ``horovod.torch`` has them."""

from collective_core.torch.mpi_ops import *  # noqa: F403
from horovod.common.basics import HorovodBasics

_basics = HorovodBasics(__file__)
