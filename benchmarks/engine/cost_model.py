"""What operations cost by the number of hosts: fitted on few ranks, held against more, extrapolated to many.

    python -m benchmarks.engine.cost_model          # from a checkout, in the engine's environment; two minutes

Every rank is a forked process with a host of its own as far as the engine can tell (TCP over loopback). All of them share this machine's
cores, so what a rank computes counts ranks / cores times, and what is waited for on the way counts once:

    time = ranks / cores * (call + message * messages + header * hosts + byte * bytes) + hop * hops

messages: of the agreement, H - 1 up to eight hosts H, then one for each of log2 H steps. header: every rank reads that of every host.
Up to MESH hosts an allreduce of N bytes goes straight to the owners of its slices and back (csrc/algorithms/mesh.cpp): 2 (H - 1)
messages more, 2 (H - 1) / H N bytes, 2 hops. More hosts have the ring: 2 messages, 2 N bytes and 2 (H - 1) hops of a first segment. To them
come the steps of the agreement. Coefficients are not negative; relative errors are what is minimised. Two ranks are left out: here they
have a core each.

A real cluster has a core or more per rank and a network of its own, whose latency and bandwidth are assumptions (``--latency-us``,
``--gbs``) in the extrapolation. What is fitted per call, message and header holds the switching between processes that share a core, which
is not there: these parts of the extrapolation are upper bounds.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import time
from typing import Any, NamedTuple, Sequence

import numpy as np
from collective_core.runtime import cores

import collective_core as cc

from . import negotiation
from .measure import keep_freed_memory
from .report import columns, duration

FITTED, PREDICTED = (4, 8, 12, 16), (32, 64)
#: Bytes of an allreduce; 0: a barrier.
SIZES = (0, 256 << 10, 1 << 20, 4 << 20)
TERMS = ("call", "message", "header", "byte", "hop")
#: Of a prediction: how far it may be off, relative to what is measured.
BAR = 0.25
#: Hosts up to which all leaders tell each other at once (csrc/negotiation/dissemination.cpp).
ALL_AT_ONCE = 8
#: Hosts up to which all have data connections to each other (csrc/transport/seam.cpp).
MESH = 65
#: Seconds of one repetition, about.
REPETITION_SECONDS, REPETITIONS = 0.1, 5
#: Of each number of ranks: where the system puts processes stays for a launch.
LAUNCHES = 2


class Point(NamedTuple):
    hosts: int
    size: int  # bytes
    seconds: float


def terms(hosts: int, size: int, share: float, has_mesh: bool = True) -> tuple[float, ...]:
    """How often each of TERMS counts. ``share``: ranks per core, where they share cores. ``has_mesh``: up to MESH hosts."""
    steps = math.ceil(math.log2(hosts))
    messages, agreement_hops = (hosts - 1, 1) if hosts <= ALL_AT_ONCE else (steps, steps)
    if not size:
        return share, share * messages, share * hosts, 0.0, agreement_hops
    sent, moved, hops = (2 * (hosts - 1), 2 * (hosts - 1) / hosts, 2) if has_mesh and hosts <= MESH else (2, 2, 2 * (hosts - 1))
    return share, share * (messages + sent), share * hosts, share * moved * size, agreement_hops + hops


def fit(points: Sequence[Point], share: float) -> tuple[float, ...]:
    """The coefficients, in seconds, with the least relative errors. ``share``: what a rank adds to the ranks per core."""
    rows = np.array([np.array(terms(p.hosts, p.size, p.hosts * share)) / p.seconds for p in points])
    best, least = (0.0,) * len(TERMS), math.inf
    # Least squares without negative coefficients: the best of all sets of terms, of which there are few.
    for chosen in itertools.chain.from_iterable(itertools.combinations(range(len(TERMS)), n) for n in range(1, len(TERMS) + 1)):
        scale = np.linalg.norm(rows[:, chosen], axis=0)
        solved = np.linalg.lstsq(rows[:, chosen] / scale, np.ones(len(rows)), rcond=None)[0] / scale
        error = float(np.linalg.norm(rows[:, chosen] @ solved - 1))
        if solved.min() >= 0 and error < least:
            values = dict(zip(chosen, solved))
            best, least = tuple(float(values.get(number, 0.0)) for number in range(len(TERMS))), error
    return best


def predict(coefficients: Sequence[float], hosts: int, size: int, share: float, has_mesh: bool = True) -> float:
    """Seconds. ``share``: ranks per core; 1 and less where each has its own."""
    return sum(value * count for value, count in zip(coefficients, terms(hosts, size, share, has_mesh)))


def measured(worlds: Sequence[int]) -> list[Point]:
    """For each number of ranks and each of SIZES, the mean over the launches of the slowest rank's median."""
    found: dict[tuple[int, int], list[float]] = {}
    for _ in range(LAUNCHES):
        for ranks in worlds:
            results = negotiation.of_forked_ranks(ranks, _measure)
            for number, size in enumerate(SIZES):
                found.setdefault((ranks, size), []).append(max(result["seconds"][number] for result in results))
    return [Point(ranks, size, statistics.mean(seconds)) for (ranks, size), seconds in found.items()]


def _measure() -> dict[str, Any]:
    keep_freed_memory()
    cc.init()
    return {"seconds": [_of_size(size) for size in SIZES]}


def _of_size(size: int) -> float:
    array = np.zeros(size // 4, dtype=np.float32)

    def step() -> None:
        if size:
            cc.allreduce(array, op=cc.Sum, out=array, name="measured")
        else:
            cc.barrier("measured")

    def seconds(count: int) -> float:
        cc.barrier("together")
        begin = time.perf_counter()
        for _ in range(count):
            step()
        return (time.perf_counter() - begin) / count

    once = statistics.median(seconds(1) for _ in range(5))
    slowest = float(cc.allreduce(np.array([once]), op=cc.Max, name="slowest")[0])
    count = max(1, int(REPETITION_SECONDS / slowest))
    return statistics.median(seconds(count) for _ in range(REPETITIONS))


def comparison(points: Sequence[Point], coefficients: Sequence[float], share: float) -> tuple[list[str], float]:
    """A table, and the largest relative error in it."""
    rows: list[tuple[str, ...]] = [("ranks", "bytes", "measured", "predicted", "off by")]
    most = 0.0
    for point in points:
        expected = predict(coefficients, point.hosts, point.size, point.hosts * share)
        off = expected / point.seconds - 1
        most = max(most, abs(off))
        rows.append((str(point.hosts), str(point.size), duration(point.seconds * 1e6), duration(expected * 1e6), f"{100 * off:+.0f} %"))
    return columns(rows), most


def extrapolation(coefficients: Sequence[float], latency: float, bandwidth: float) -> list[str]:
    """Hosts with a core or more per rank and eight GPUs each: what agreeing costs, and an allreduce of host memory by the engine's ring.

    The ring is what several ranks per host have; all that is measured here has one, and goes to the owners of slices.
    ``latency``: seconds of a message on the network, in the place of the fitted hop. ``bandwidth``: bytes/s of a host's network each way,
    which bounds what is fitted per byte.
    """
    call, message, header, byte, _ = coefficients
    assumed = call, message, header, max(byte, 1 / bandwidth), latency
    rows: list[tuple[str, ...]] = [("hosts", "GPUs", "agreement", "1 MiB", "64 MiB", "1 GiB")]
    for hosts in (4, 8, 16, 64, 250, 1000):
        times = [duration(predict(assumed, hosts, size, 1.0, has_mesh=False) * 1e6) for size in (0, 1 << 20, 64 << 20, 1 << 30)]
        rows.append((str(hosts), str(8 * hosts), *times))
    return columns(rows)


def main() -> int:
    """Measure, fit, print; 1 where a prediction misses the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency-us", type=float, default=10.0, help="of a message between hosts, assumed (%(default)g)")
    parser.add_argument("--gbs", type=float, default=12.5, help="GB/s of a host's network each way, assumed (%(default)g)")
    wanted = parser.parse_args()
    share = 1 / cores.share(1)
    fitted = measured(FITTED)
    coefficients = fit(fitted, share)
    print(f"fitted on {', '.join(map(str, FITTED))} ranks that share {cores.share(1)} cores:")
    print("  " + ", ".join(f"{name} {value * 1e6:.4g} us" for name, value in zip(TERMS, coefficients)))
    print("\n".join(comparison(fitted, coefficients, share)[0]))
    table, off = comparison(measured(PREDICTED), coefficients, share)
    print(f"\npredicted: at most {100 * off:.0f} % off ({100 * BAR:.0f} %): {'reached' if off <= BAR else 'missed'}")
    print("\n".join(table))
    print(f"\nextrapolated, with {wanted.latency_us:g} us and {wanted.gbs:g} GB/s of the network, assumed:")
    print("\n".join(extrapolation(coefficients, wanted.latency_us * 1e-6, wanted.gbs * 1e9)))
    return 0 if off <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
