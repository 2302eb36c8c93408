"""What each way to train a model together would cost on the network between the ranks of this job, which is measured."""

from __future__ import annotations

import statistics
import time

import torch

from collective_core.extensions.slow_networks.communication import FLOAT_BYTES, CommunicationPlan, Network, plan
from collective_core.runtime.process_sets import ProcessSet, members
from collective_core.torch.compiling import not_compiled
from collective_core.torch.ops.allreduce import Max, Sum, allreduce_
from collective_core.torch.sharded import is_shard

#: Sums of one element whose median is the latency, after the first, which connects.
LATENCY_ROUNDS = 7
#: A sum as long as this is long enough to tell the bandwidth, which is the fastest of so many: TCP begins slowly. None has more elements
#: than MAX_ELEMENTS.
LONG_ENOUGH, LONG_ROUNDS = 0.25, 4
FIRST_ELEMENTS, MAX_ELEMENTS = 1 << 14, 1 << 23


def measure_network(process_set: ProcessSet | None = None) -> Network:
    """Latency and bandwidth of sums over the ranks, in less than about two seconds. Collective; all ranks get the same figures."""

    def seconds(elements: int) -> float:
        """Of the slowest rank."""
        tensor = torch.zeros(elements)
        allreduce_(torch.zeros(1), name="network.begin", op=Sum, process_set=process_set)
        begin = time.perf_counter()
        allreduce_(tensor, name="network.sum", op=Sum, process_set=process_set)
        spent = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
        return float(allreduce_(spent, name="network.seconds", op=Max, process_set=process_set))

    ranks = members(process_set).size
    latency = statistics.median([seconds(1) for _ in range(LATENCY_ROUNDS + 1)][1:])
    elements, spent = FIRST_ELEMENTS, seconds(FIRST_ELEMENTS)
    while spent < LONG_ENOUGH and elements < MAX_ELEMENTS:
        elements *= 4 if spent < LONG_ENOUGH / 8 else 2
        spent = seconds(elements)
    spent = min(spent, *(seconds(elements) for _ in range(LONG_ROUNDS - 1)))
    sent = 2 * (ranks - 1) / ranks * elements * FLOAT_BYTES
    return Network(ranks, latency, sent / max(spent - latency, spent / 10))


@not_compiled
def plan_communication(
    model: torch.nn.Module, sync_every: int = 100, rank: int = 4, ratio: float = 0.01, process_set: ProcessSet | None = None
) -> CommunicationPlan:
    """Bytes that each rank sends and milliseconds, per step, of DistributedOptimizer with each compression, LocalSGD and DiLoCo.

    Measures the network between the ranks, in about two seconds. Collective; all ranks get the same plan. ``str(plan)`` is a table,
    ``plan.as_data()`` plain values. Times are of communication alone: what overlaps with computing (by DiLoCo's ``delay``, say) costs less.

    Args:
        sync_every: steps from one synchronisation to the next, of LocalSGD and DiLoCo.
        rank: of PowerSGD.
        ratio: of top-k.
    """
    shapes = [tuple(p.shape) for p in model.parameters() if p.requires_grad and not is_shard(p)]
    return plan(shapes, measure_network(process_set), sync_every, rank, ratio)
