"""Data-parallel training over shared memory and TCP: the neutral API, on NumPy arrays.

``import collective_core.torch as hvd`` is the API for PyTorch; this one works without PyTorch::

    import collective_core as cc
    cc.init()
    total = cc.allreduce(array, op=cc.Sum)

Sums are formed in one order for any size and chunking, so every rank has the same bits, and two runs agree:
rank by rank within a host and then host by host, or with ``COLLECTIVE_SUM_ORDER=ranks`` in rank order on any topology.
No operation hangs: ``COLLECTIVE_TIMEOUT`` limits how long it may go without progress; ``docs/engine-settings.md`` lists the
environment variables. After ``init`` a process may ``fork`` children, such as workers of data loaders, that do not use the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from collective_core import lazy
from collective_core.arrays import (
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
    empty,
    join,
    reducescatter,
)
from collective_core.errors import CollectiveError, HorovodInternalError
from collective_core.job import init, shutdown
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
from collective_core.runtime.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from collective_core.version import __version__ as __version__

if TYPE_CHECKING:
    from collective_core.launch import NotSendableError as NotSendableError
    from collective_core.launch import RankFailedError as RankFailedError
    from collective_core.launch import Runner as Runner
    from collective_core.launch import run as run

#: What starts ranks, which no rank needs: imported when it is asked for.
_LAUNCHING = ("NotSendableError", "RankFailedError", "Runner", "run")
if not TYPE_CHECKING:  # for which every name would be there
    __getattr__, __dir__ = lazy.attributes(__name__, {name: f"collective_core.launch:{name}" for name in _LAUNCHING})

__all__ = [
    "Average",
    "CollectiveError",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "cross_rank",
    "cross_size",
    "empty",
    "global_process_set",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "metrics",
    "rank",
    "reducescatter",
    "remove_process_set",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
