"""The engine for PyTorch, with Horovod's interface: ``import collective_core.torch as hvd``.

    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

Not in this version: Adasum, process sets, sparse gradients, join, reduce-scatter, alltoall, elastic jobs. They raise an error
that says so.
"""

from __future__ import annotations

from typing import Any

from collective_core import __version__
from collective_core.context import (
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from collective_core.errors import CollectiveError, HorovodInternalError
from collective_core.torch.compression import Compression
from collective_core.torch.functions import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters
from collective_core.torch.ops import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allreduce,
    grouped_allreduce_,
    poll,
    synchronize,
)
from collective_core.torch.optimizer import DistributedOptimizer


def _false() -> bool:
    """Not part of this engine: it links no MPI, NCCL, Gloo, CUDA or ROCm."""
    return False


mpi_built = mpi_enabled = mpi_threads_supported = nccl_built = gloo_built = gloo_enabled = _false
cuda_built = rocm_built = ddl_built = ccl_built = _false


def __getattr__(name: str) -> Any:
    if name in ("join", "alltoall", "reducescatter", "ProcessSet", "add_process_set", "SyncBatchNorm", "elastic", "start_timeline"):
        raise AttributeError(f"hvd.{name} is not in this version of collective_core ({__version__})")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Adasum",
    "Average",
    "CollectiveError",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "grouped_allreduce",
    "grouped_allreduce_",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "shutdown",
    "size",
    "synchronize",
]
