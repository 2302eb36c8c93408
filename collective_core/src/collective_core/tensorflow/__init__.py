"""The engine for TensorFlow, with Horovod's interface: ``import collective_core.tensorflow as hvd``.

    hvd.init()
    hvd.broadcast_variables(model.variables, root_rank=0)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = ...
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

TensorFlow 2.16 or newer, in eager mode, in ``tf.function`` and in the graphs of TensorFlow 1. docs/tensorflow.md lists what differs from
Horovod.
"""

from __future__ import annotations

from typing import Any

from collective_core.tensorflow import requirement as requirement  # isort: skip - before TensorFlow is used

from collective_core.common import interface
from collective_core.common.interface import *  # noqa: F403
from collective_core.extensions import streaming as data
from collective_core.job import init, shutdown
from collective_core.observe.metrics import metrics
from collective_core.observe.timeline import start_timeline, stop_timeline
from collective_core.runtime.process_sets import add_process_set, remove_process_set
from collective_core.tensorflow import elastic
from collective_core.tensorflow.build_info import cuda_built, nccl_built
from collective_core.tensorflow.compression import Compression
from collective_core.tensorflow.engine_calls import error_of_engine
from collective_core.tensorflow.functions import allgather_object, broadcast_object, broadcast_object_fn, broadcast_variables
from collective_core.tensorflow.mpi_ops import (
    Average,
    Max,
    Min,
    Product,
    Sum,
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    join,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    reducescatter,
    size_op,
)
from collective_core.tensorflow.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from collective_core.tensorflow.session import BroadcastGlobalVariablesHook, broadcast_global_variables
from collective_core.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape


def __getattr__(name: str) -> Any:
    if name == "SyncBatchNormalization":  # needs Keras, which takes a second to import
        from collective_core.tensorflow.sync_batch_norm import SyncBatchNormalization

        return SyncBatchNormalization
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Average",
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "PartialDistributedOptimizer",
    "Product",
    "Sum",
    "SyncBatchNormalization",  # noqa: F405 - by __getattr__
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "cuda_built",
    "data",
    "elastic",
    "error_of_engine",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "join",
    "local_rank_op",
    "local_size_op",
    "metrics",
    "nccl_built",
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "shutdown",
    "size_op",
    "start_timeline",
    "stop_timeline",
]
__all__ += interface.__all__
