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
from collective_core import data
from collective_core.common.build_info import (
    ccl_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    rocm_built,
)
from collective_core.errors import CollectiveError, HorovodInternalError
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
from collective_core.runtime.membership import (
    cross_rank,
    cross_size,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    size,
)
from collective_core.runtime.process_sets import ProcessSet, get_process_set_ids_and_ranks, global_process_set, process_set_by_id

__all__ = [
    "AccumulatedState",
    "Average",
    "CollectiveError",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
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
    "ccl_built",
    "cross_rank",
    "cross_size",
    "data",
    "ddl_built",
    "elastic",
    "get_process_set_ids_and_ranks",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grad",
    "grouped_allreduce",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "metrics",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "process_set_by_id",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "value_and_grad",
]
