"""The collectives, as ``horovod.tensorflow`` has them."""

from collective_core.tensorflow import *  # noqa: F403
from horovod.common.basics import HorovodBasics

_basics = HorovodBasics(__file__)
