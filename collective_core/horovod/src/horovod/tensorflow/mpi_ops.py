"""The collectives, as ``horovod.tensorflow`` has them."""

from collective_core.tensorflow import *  # noqa: F403
