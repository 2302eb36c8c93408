"""Names that the interfaces of all frameworks have: ``from collective_core.common.interface import *``."""

from __future__ import annotations

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
    "CollectiveError",
    "HorovodInternalError",
    "ProcessSet",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "ddl_built",
    "get_process_set_ids_and_ranks",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "process_set_by_id",
    "rank",
    "rocm_built",
    "size",
]
