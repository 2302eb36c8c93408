"""The engine for JAX, with Horovod's names: ``import collective_core.jax as hvd``.

    hvd.init()
    optimizer = hvd.DistributedOptimizer(optax.adam(1e-3))
    params = hvd.broadcast_parameters(params, root_rank=0)

    @jax.jit
    def step(params, state, batch):
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, hvd.allreduce(loss)

docs/jax.md says what is different inside compiled functions.
"""

from __future__ import annotations

from collective_core.jax import requirement as requirement  # isort: skip - says what is missing
from collective_core.common import interface
from collective_core.common.interface import *  # noqa: F403
from collective_core.extensions import streaming as data
from collective_core.jax import elastic
from collective_core.jax.compression import Compression
from collective_core.jax.functions import allgather_object, broadcast_object, broadcast_parameters
from collective_core.jax.job import add_process_set, init, remove_process_set, shutdown
from collective_core.jax.ops import (
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
    grouped_allreduce,
    join,
    reducescatter,
)
from collective_core.jax.optimizer import AccumulatedState, DistributedOptimizer, grad, value_and_grad
from collective_core.observe.metrics import metrics
from collective_core.observe.timeline import start_timeline, stop_timeline

__all__ = [
    "AccumulatedState",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Max",
    "Min",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_parameters",
    "data",
    "elastic",
    "grad",
    "grouped_allreduce",
    "init",
    "join",
    "metrics",
    "reducescatter",
    "remove_process_set",
    "shutdown",
    "start_timeline",
    "stop_timeline",
    "value_and_grad",
]
__all__ += interface.__all__
