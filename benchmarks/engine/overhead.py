"""``--overhead``: what the timeline, the flight recorder and autotune cost a training step; what ``init`` takes; what the engine holds.

Every round starts the engine anew for every side, in turn, with that side's variables, and trains the network of MNIST. A side's cost is
the median over the rounds of its time beside the plain side's of the same round. Under ``mpirun`` only, where ranks may meet again.
"""

from __future__ import annotations

import contextlib
import io
import os
import statistics
import tempfile
import time
from typing import Any

import torch
from collective_core.runtime import cores, membership

import collective_core as cc

from . import measure, report, training
from .options import Options

PLAIN = "plain"
STEPS, WARM_UP = 20, 3
#: Smaps names the engine's mappings by this.
MAPPING = "/memfd:collective_core"


def variables(folder: str) -> dict[str, dict[str, str]]:
    """By side, what it sets."""
    return {
        PLAIN: {},
        "timeline": {"COLLECTIVE_TIMELINE": os.path.join(folder, "timeline.json")},
        "flight recorder": {"COLLECTIVE_FLIGHT_RECORDER": folder},
        "autotune": {"COLLECTIVE_AUTOTUNE": "1", "COLLECTIVE_AUTOTUNE_CACHE": os.path.join(folder, "autotune.json")},
    }


def run(wanted: Options) -> dict[str, Any]:
    """The document of ``--overhead``; the engine is initialised when it is called, and when it returns."""
    torch.set_num_threads(cores.share(membership.current().local_size, cores.launcher()))
    steps: dict[str, list[float]] = {}
    starts: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        sides = variables(folder)
        for number in range(wanted.rounds):
            for turn in range(len(sides)):
                name = list(sides)[(turn + number) % len(sides)]
                start, step = _one(sides[name])
                starts.append(start)
                steps.setdefault(name, []).append(step)
    cc.shutdown()
    before = _held(everything=True)
    cc.init()
    added = max(0, _held(everything=True) - before)
    gradients, held = _memory_of_a_model(wanted)
    return {
        "schema": report.SCHEMA,
        "overhead": [
            {
                "side": name,
                "step_us": round(statistics.median(times) * 1e6, 1),
                "cost": round(_beside(times, steps[PLAIN]), 4),
                "least_us": round(min(times) * 1e6, 1),
            }
            for name, times in steps.items()
        ],
        "np": cc.size(),
        "rounds": wanted.rounds,
        "init_s": round(statistics.median(starts), 3),
        "gradient_bytes": gradients,
        "engine_bytes": _of_all(held + added),
        "missing": {},
    }


def _one(variables: dict[str, str]) -> tuple[float, float]:
    """Seconds of ``init`` and of a step, of the slowest rank, with these variables."""
    cc.shutdown()
    os.environ.update(variables)
    try:
        begin = time.perf_counter()
        cc.init()
        start = time.perf_counter() - begin
        step = training.training_step("collective_core", training.TASKS["mnist"], training.TASKS["mnist"].batch)
        for _ in range(WARM_UP):
            step()
        spent = measure.timed(step, STEPS) / STEPS
        slowest = measure.slowest([start, spent])
        with contextlib.redirect_stderr(io.StringIO()):  # the timeline's table
            cc.shutdown()
    finally:
        for name in variables:
            del os.environ[name]
    cc.init()
    return slowest[0], slowest[1]


def _beside(times: list[float], plain: list[float]) -> float:
    return statistics.median(ours / theirs for ours, theirs in zip(times, plain)) - 1.0


def _memory_of_a_model(wanted: Options) -> tuple[int, int]:
    """Bytes of all ranks' gradients of the large model, and of this rank's share of the engine's mappings after steps with it."""
    task = training.TASKS["mlp"]
    step = training.training_step("collective_core", task, wanted.batch or task.batch)
    for _ in range(2):
        step()
    return sum(p.numel() * 4 for p in task.model().parameters()) * cc.size(), _held(everything=False)


def _held(everything: bool) -> int:
    """Bytes of memory of this process, pages that it shares counted in part: all, or those of the engine's mappings."""
    total, counts = 0, everything
    with open("/proc/self/smaps") as file:
        for line in file:
            first = line.split(maxsplit=1)[0]
            if not first.endswith(":"):
                counts = everything or MAPPING in line
            elif first == "Pss:" and counts:
                total += int(line.split()[1]) << 10
    return total


def _of_all(mine: int) -> int:
    return sum(int(size) for size in cc.allgather([mine]))
