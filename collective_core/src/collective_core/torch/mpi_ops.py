"""The interface but for optional parts, under the name of the module that scripts for Horovod import it from, too."""

from __future__ import annotations

from collective_core import job
from collective_core.common import interface
from collective_core.common.interface import *  # noqa: F403
from collective_core.observe import metrics as observed
from collective_core.observe import timeline
from collective_core.runtime import process_sets
from collective_core.torch.build_info import cuda_built, nccl_built, nccl_enabled
from collective_core.torch.checkpoint import Checkpoints, CheckpointWarning
from collective_core.torch.compiling import not_compiled
from collective_core.torch.compression import Compression
from collective_core.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_object_fn,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from collective_core.torch.handles import poll, synchronize
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

# A compiler finds nothing to trace in these.
init, shutdown, metrics = not_compiled(job.init), not_compiled(job.shutdown), not_compiled(observed.metrics)
add_process_set, remove_process_set = not_compiled(process_sets.add_process_set), not_compiled(process_sets.remove_process_set)
start_timeline, stop_timeline = not_compiled(timeline.start_timeline), not_compiled(timeline.stop_timeline)

__all__ = [
    "Adasum",
    "Average",
    "CheckpointWarning",
    "Checkpoints",
    "Compression",
    "DistributedOptimizer",
    "GradScaler",
    "Max",
    "Min",
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
    "compare_steps",
    "cuda_built",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "join",
    "metrics",
    "nccl_built",
    "nccl_enabled",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "sample_weight",
    "shutdown",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
__all__ += interface.__all__
