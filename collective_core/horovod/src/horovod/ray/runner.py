"""As ``horovod.ray``."""

from horovod.ray import RayExecutor as RayExecutor
