"""The planner for this job: its ranks, and what moving rows costs between them."""

from __future__ import annotations

import time
from typing import Callable, Sequence

import torch

from collective_core.extensions.sparse import table_plan
from collective_core.extensions.sparse.table_plan import Costs, Table, TablePlan
from collective_core.runtime import membership
from collective_core.torch.functions import broadcast_object
from collective_core.torch.ops import alltoall, barrier

#: Of the largest message that is timed: large compared to what a message costs at all.
LARGE = 4 << 20
#: The median of so many counts.
CALLS = 5
#: Rows of 64 bytes among which a measurement of memory picks: more than caches hold.
PICKED_FROM, PICKED = 1 << 20, 1 << 14


def _median_seconds(call: Callable[[], object]) -> float:
    times = []
    for _ in range(CALLS):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return sorted(times)[CALLS // 2]


def measure_costs() -> Costs:
    """What moving rows between the ranks of this job costs, as rank 0 sees it; the same on all ranks. Collective."""
    size = membership.size()
    large, small = torch.zeros(size * (LARGE // size), dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    table, where = torch.zeros(PICKED_FROM, 16), torch.randint(PICKED_FROM, (PICKED,))
    barrier.barrier()
    # An alltoall has a message to each other rank.
    others = max(size - 1, 1)
    latency = _median_seconds(lambda: alltoall.alltoall(small)) / others
    whole = _median_seconds(lambda: alltoall.alltoall(large))
    moved = large.numel() / size * others
    picked = _median_seconds(lambda: table.index_select(0, where))
    # Small messages that were held up would leave no time for the large one: the network would be infinitely fast.
    costs = Costs(moved / max(whole - latency * others, whole / 10), latency, where.numel() * 64 / max(picked, 1e-9))
    agreed: Costs = broadcast_object(costs, 0)
    return agreed


def plan_tables(tables: Sequence[Table], memory: int, batch: int, costs: Costs | None = None, ranks: int | None = None) -> TablePlan:
    """Where each table should live: row-wise, table-wise, column-wise, or replicated (a ``torch.nn.Embedding`` on every rank).

    The same on all ranks that give the same arguments. With costs that are given it is not collective.

    Args:
        memory: bytes for tables and their optimizers' state on each rank.
        batch: samples per rank and step.
        costs: of moving rows; None measures them, which is collective.
        ranks: those of this job, unless given.

    Raises ValueError for a table that fits nowhere.
    """
    return table_plan.plan_tables(tables, membership.size() if ranks is None else ranks, memory, batch, costs or measure_costs())
