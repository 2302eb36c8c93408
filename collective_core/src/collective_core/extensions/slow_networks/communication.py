"""Costs of each way to train together on a network: bytes and milliseconds per step, as a table and as data.

The network between the ranks is measured (:func:`measure_network`); the rest is pure.

A sum of B bytes over n ranks has each of them send 2(n-1)/n · B (reduce-scatter and allgather, as a ring does). It takes the network's
latency, which is measured as a whole sum of one element, and the time for these bytes. Nothing is taken off for what overlaps with
computing.
"""

from __future__ import annotations

import math
import statistics
import time
from typing import Any, NamedTuple, Sequence

import torch

from collective_core.runtime.process_sets import ProcessSet, members_of
from collective_core.torch.compiling import not_compiled
from collective_core.torch.ops.allreduce import Max, Sum, allreduce_
from collective_core.torch.sharded import is_shard

FLOAT_BYTES, HALF_BYTES = 4, 2
#: Of blocks of 128 elements with a float32 scale each (quantization.py).
BYTES_OF_BITS = {32: 4.0, 8: 1 + 4 / 128, 4: 0.5 + 4 / 128}
#: Sums of one element whose median is the latency, after the first, which connects.
LATENCY_ROUNDS = 7
#: A sum as long as this is long enough to tell the bandwidth, which is the fastest of so many: TCP begins slowly. None has more elements
#: than MAX_ELEMENTS.
LONG_ENOUGH, LONG_ROUNDS = 0.25, 4
FIRST_ELEMENTS, MAX_ELEMENTS = 1 << 14, 1 << 23


class Network(NamedTuple):
    """Network as measured between the ranks of a job: the slowest rank's."""

    ranks: int
    latency: float  # seconds of a sum of one element
    bandwidth: float  # bytes per second that each rank sends in a long sum


class Choice(NamedTuple):
    """One row. ``bytes``: sent by each rank per step, on average; ``milliseconds``: likewise."""

    name: str
    bytes: float
    milliseconds: float


class CommunicationPlan(NamedTuple):
    """``str()`` is a table."""

    network: Network
    parameters: int
    choices: list[Choice]

    def as_data(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "network": self.network._asdict(),
            "parameters": self.parameters,
            "choices": [choice._asdict() for choice in self.choices],
        }

    def __str__(self) -> str:
        network = self.network
        head = (
            f"{self.parameters} parameters, {network.ranks} ranks; a sum takes {network.latency * 1e3:.2f} ms and 1 s for each "
            f"{network.bandwidth / 1e6:.1f} MB that a rank sends"
        )
        width = max(len(choice.name) for choice in self.choices)
        none = self.choices[0]
        rows = [f"{'':{width}}  {'KB/step':>12}  {'ms/step':>10}  {'bytes':>8}"]
        for choice in self.choices:
            share = f"1/{none.bytes / choice.bytes:.0f}" if choice.bytes < none.bytes / 1.5 else "1"
            rows.append(f"{choice.name:{width}}  {choice.bytes / 1e3:12.1f}  {choice.milliseconds:10.2f}  {share:>8}")
        return "\n".join([head, *rows])


def as_matrix(shape: Sequence[int], rank: int) -> tuple[int, int]:
    """Rows and columns of a parameter as a matrix for PowerSGD; (elements, 0) where its factors would not be half as long."""
    elements = math.prod(shape)
    rows = shape[0] if len(shape) > 1 else elements
    columns = elements // rows if rows else 0
    worthwhile = len(shape) > 1 and (rows + columns) * rank * 2 <= rows * columns
    return (rows, columns) if worthwhile else (elements, 0)


def plan(shapes: Sequence[Sequence[int]], network: Network, sync_every: int, rank: int, ratio: float) -> CommunicationPlan:
    """For a model with float32 parameters of these shapes; ``rank`` of PowerSGD, ``ratio`` of top-k."""
    elements = sum(math.prod(shape) for shape in shapes)
    matrices = [as_matrix(shape, rank) for shape in shapes]
    factors = sum((rows + columns) * rank if columns else rows for rows, columns in matrices)
    others = network.ranks - 1
    ring = 2 * others / network.ranks
    quantized = 1 if network.ranks == 2 else 2  # operations of a quantized sum

    def choice(name: str, sent: float, operations: int, every: int = 1) -> Choice:
        seconds = operations * network.latency + sent / network.bandwidth if others else 0.0
        return Choice(name, sent / every, seconds * 1e3 / every)

    rows = [
        choice("DistributedOptimizer", ring * FLOAT_BYTES * elements, 1),
        choice("  Compression.bf16", ring * HALF_BYTES * elements, 1),
        choice("  Compression.int8", ring * BYTES_OF_BITS[8] * elements, quantized),
        choice(f"  Compression.powersgd(rank={rank})", ring * FLOAT_BYTES * factors, 2 if any(columns for _, columns in matrices) else 1),
        choice(f"  Compression.topk(ratio={ratio:g})", others * 2 * FLOAT_BYTES * math.ceil(ratio * elements), 1),
        choice(f"LocalSGD, DiLoCo(sync_every={sync_every})", ring * FLOAT_BYTES * elements, 1, sync_every),
        choice(f"  DiLoCo(sync_every={sync_every}, bits=8)", ring * BYTES_OF_BITS[8] * elements, quantized, sync_every),
        choice(f"  DiLoCo(sync_every={sync_every}, bits=4)", ring * BYTES_OF_BITS[4] * elements, quantized, sync_every),
    ]
    return CommunicationPlan(network, elements, rows)


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

    ranks = members_of(process_set).size
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
