"""What operations cost by the number of hosts: simulated counts, times fitted on few ranks, held against more.

    python -m benchmarks.engine.cost_model          # from a checkout, in the engine's environment; two minutes

Every rank is a forked process with a host of its own as far as the engine can tell (TCP over loopback). All of them share this machine's
cores, so what all ranks compute counts once per core, and what is waited for on the way counts once. A rank looks after all others (peer):

    time = (call * ranks + message * messages + peer * ranks * ranks + byte * bytes) / cores + hop * steps

Messages, bytes and steps are what the simulation (``simulation.py``) counts in the engine's own code. Coefficients are not negative;
relative errors are what is minimised. Two ranks are left out: here they have a core each.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Mapping, NamedTuple, Sequence

import numpy as np
from collective_core.runtime import cores

import collective_core as cc

from . import negotiation, simulation
from .measure import keep_freed_memory
from .report import columns, duration

FITTED, PREDICTED = (4, 8, 12, 16), (32, 64)
#: Bytes of an allreduce; 0: a barrier.
SIZES = (0, 256 << 10, 1 << 20, 4 << 20)
TERMS = ("call", "message", "peer", "byte", "hop")
#: Of a prediction: how far it may be off, relative to what is measured.
BAR = 0.25
#: Seconds of one repetition, about.
REPETITION_SECONDS, REPETITIONS = 0.1, 5
#: Of each number of ranks: where the system puts processes stays for a launch.
LAUNCHES = 2


class Point(NamedTuple):
    hosts: int
    size: int  # bytes
    seconds: float


#: By hosts and size.
Counts = Mapping[tuple[int, int], simulation.Simulated]


def simulated(worlds: Sequence[int]) -> Counts:
    """What is sent, by hosts of one rank each and by size."""
    operations = [("allreduce" if size else "barrier", size) for size in SIZES]
    with tempfile.TemporaryDirectory() as folder:
        program = simulation.build(Path(folder))
        found = [one for hosts in worlds for one in simulation.simulate(program, hosts, 1, operations)]
    return {(one.hosts, one.size): one for one in found}


def terms(one: simulation.Simulated, cores: int) -> tuple[float, ...]:
    """How often each of TERMS counts."""
    return one.hosts / cores, one.messages / cores, one.hosts**2 / cores, one.bytes / cores, one.steps


def fit(points: Sequence[Point], counts: Counts, cores: int) -> tuple[float, ...]:
    """The coefficients, in seconds, with the least relative errors."""
    rows = np.array([np.array(terms(counts[p.hosts, p.size], cores)) / p.seconds for p in points])
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


def predict(coefficients: Sequence[float], one: simulation.Simulated, cores: int) -> float:
    """Seconds."""
    return sum(value * count for value, count in zip(coefficients, terms(one, cores)))


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


def comparison(points: Sequence[Point], counts: Counts, coefficients: Sequence[float], cores: int) -> tuple[list[str], float]:
    """A table, and the largest relative error in it."""
    rows: list[tuple[str, ...]] = [("ranks", "bytes", "measured", "predicted", "off by")]
    most = 0.0
    for point in points:
        expected = predict(coefficients, counts[point.hosts, point.size], cores)
        off = expected / point.seconds - 1
        most = max(most, abs(off))
        rows.append((str(point.hosts), str(point.size), duration(point.seconds * 1e6), duration(expected * 1e6), f"{100 * off:+.0f} %"))
    return columns(rows), most


def main() -> int:
    """Measure, fit, print; 1 where a prediction misses the bar."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    shared = cores.share(1)
    counts = simulated(FITTED + PREDICTED)
    fitted = measured(FITTED)
    coefficients = fit(fitted, counts, shared)
    print(f"fitted on {', '.join(map(str, FITTED))} ranks that share {shared} cores:")
    print("  " + ", ".join(f"{name} {value * 1e6:.4g} us" for name, value in zip(TERMS, coefficients)))
    print("\n".join(comparison(fitted, counts, coefficients, shared)[0]))
    table, off = comparison(measured(PREDICTED), counts, coefficients, shared)
    print(f"\npredicted: at most {100 * off:.0f} % off ({100 * BAR:.0f} %): {'reached' if off <= BAR else 'missed'}")
    print("\n".join(table))
    return 0 if off <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
