"""The whole interface, under the name of the module that scripts for Horovod import it from, too."""

from __future__ import annotations

from collective_core import data
from collective_core.errors import CollectiveError, HorovodInternalError
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
from collective_core.torch import elastic, nn, ps
from collective_core.torch.build_info import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    nccl_enabled,
    rocm_built,
)
from collective_core.torch.checkpoint import Checkpoints, CheckpointWarning
from collective_core.torch.communication import plan_communication
from collective_core.torch.compression import Compression
from collective_core.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_object_fn,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from collective_core.torch.handles import poll, synchronize
from collective_core.torch.job import add_process_set, init, metrics, remove_process_set, shutdown, start_timeline, stop_timeline
from collective_core.torch.local_sgd import DiLoCo, LocalSGD
from collective_core.torch.ops.allgather import allgather, allgather_async, grouped_allgather, grouped_allgather_async
from collective_core.torch.ops.allreduce import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from collective_core.torch.ops.alltoall import alltoall, alltoall_async
from collective_core.torch.ops.barrier import barrier, join
from collective_core.torch.ops.broadcast import broadcast, broadcast_, broadcast_async, broadcast_async_
from collective_core.torch.ops.reducescatter import grouped_reducescatter, grouped_reducescatter_async, reducescatter, reducescatter_async
from collective_core.torch.ops.sparse import sparse_allreduce_async
from collective_core.torch.optimizer import DistributedOptimizer, GradScaler
from collective_core.torch.sync_batch_norm import SyncBatchNorm
from collective_core.torch.uneven import ShardSampler, UnevenDataWarning, compare_steps, sample_weight

__all__ = [
    "Adasum",
    "Average",
    "CheckpointWarning",
    "Checkpoints",
    "CollectiveError",
    "Compression",
    "DiLoCo",
    "DistributedOptimizer",
    "GradScaler",
    "HorovodInternalError",
    "LocalSGD",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "ShardSampler",
    "Sum",
    "SyncBatchNorm",
    "UnevenDataWarning",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "compare_steps",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "data",
    "ddl_built",
    "elastic",
    "get_process_set_ids_and_ranks",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
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
    "nccl_built",
    "nccl_enabled",
    "nn",
    "plan_communication",
    "poll",
    "process_set_by_id",
    "ps",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "sample_weight",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
