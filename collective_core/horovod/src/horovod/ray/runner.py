from horovod.ray import RayExecutor as RayExecutor
