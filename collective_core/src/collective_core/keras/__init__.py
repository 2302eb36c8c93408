"""The engine for Keras 3, with Horovod's interface, on its TensorFlow, JAX and PyTorch backends: ``import collective_core.keras as hvd``.

    hvd.init()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3 * hvd.size()))
    model.compile(optimizer=optimizer, loss=..., metrics=[...])
    model.fit(data, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()])

docs/keras.md lists what differs from Horovod.
"""

from __future__ import annotations

from collective_core.keras import requirement as requirement  # isort: skip - says what is missing

from collective_core.common import interface
from collective_core.common.interface import *  # noqa: F403
from collective_core.extensions import streaming as data
from collective_core.keras import callbacks, elastic
from collective_core.keras.functions import allgather, allreduce, broadcast, reducescatter
from collective_core.keras.optimizer import Compression, DistributedOptimizer, PartialDistributedOptimizer, load_model
from collective_core.keras.variables import broadcast_global_variables, broadcast_variables
from collective_core.observe.metrics import metrics
from collective_core.observe.timeline import start_timeline, stop_timeline

Average, Max, Min, Product, Sum = (getattr(requirement.framework, op) for op in ("Average", "Max", "Min", "Product", "Sum"))
allgather_object, broadcast_object = requirement.framework.allgather_object, requirement.framework.broadcast_object
init, shutdown, join, barrier = (getattr(requirement.framework, name) for name in ("init", "shutdown", "join", "barrier"))
add_process_set, remove_process_set = requirement.framework.add_process_set, requirement.framework.remove_process_set


def nccl_built() -> int:
    """Whether tensors on GPUs can go through NCCL: as the module of Keras's backend says, 0 where it says nothing."""
    return int(getattr(requirement.framework, "nccl_built", int)())


def cuda_built() -> bool:
    """Whether the framework was built for CUDA: as the module of Keras's backend says, False where it says nothing."""
    return bool(getattr(requirement.framework, "cuda_built", bool)())


__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Max",
    "Min",
    "PartialDistributedOptimizer",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "cuda_built",
    "data",
    "elastic",
    "init",
    "join",
    "load_model",
    "metrics",
    "nccl_built",
    "reducescatter",
    "remove_process_set",
    "shutdown",
    "start_timeline",
    "stop_timeline",
]
__all__ += interface.__all__
