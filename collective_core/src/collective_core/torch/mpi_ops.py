"""The collectives under the name of Horovod's module, which scripts import from."""

from collective_core.torch import *  # noqa: F403
