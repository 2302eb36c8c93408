"""Parameter servers with one slow worker: how fast the others are, beside themselves without it.

    .venv-engine/bin/python -m benchmarks.engine.parameter_server                # two minutes
    .venv-engine/bin/python -m benchmarks.engine.parameter_server --workers 3 --factor 5 --rounds 5 --report ps.json

A step of a worker is the forward and backward pass of an MLP, on one thread, and a pause, which stands for what an accelerator or a host
of its own would do meanwhile: ranks of one machine share its cores, and a worker that computed all the time would take them from the
others. The slow worker pauses `--factor` times as long. With and without it take turns within each round; a speed is that of the slowest of
the other workers, a ratio that of one round, and the report has their medians. Without a bound the slow worker makes fewer steps in the
same time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Sequence

import torch
from torch import nn

#: Steps before those that are measured.
WARM_UP = 5
STALENESS: tuple[int | None, ...] = (None, 0)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """On every rank; the report is rank 0's."""
    import collective_core.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    if hvd.ps.is_server():
        hvd.ps.serve()
        return {}
    workers = hvd.ps.workers()
    me = hvd.rank()
    is_slow = me == hvd.size() - arguments.servers - 1

    def speed(staleness: int | None, with_slow: bool) -> float:
        """Steps per second of the slowest of the others."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
        optimizer = hvd.ps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model, staleness=staleness)
        x, y = torch.randn(32, 64), torch.randint(10, (32,))
        slowed = with_slow and is_slow
        steps = arguments.steps // arguments.factor if slowed and staleness is None else arguments.steps

        def step(pause: float) -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            time.sleep(pause)
            optimizer.step()

        for _ in range(WARM_UP):
            step(0.0)
        hvd.barrier(process_set=workers)
        began = time.perf_counter()
        for _ in range(steps):
            step(arguments.pause / 1000 * (arguments.factor if slowed else 1))
        took = time.perf_counter() - began
        everyone: list[float] = hvd.allgather_object(steps / took, process_set=workers)
        return min(everyone[:-1])

    rows: list[dict[str, Any]] = []
    for number in range(arguments.rounds):
        for staleness in STALENESS:
            order = (False, True) if number % 2 else (True, False)
            found = {with_slow: speed(staleness, with_slow) for with_slow in order}
            rows.append({"staleness": staleness, "without": found[False], "with": found[True], "ratio": found[True] / found[False]})
    return {"rounds": rows} if me == 0 else {}


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians over the rounds, by staleness."""
    found = []
    for staleness in STALENESS:
        mine = [row for row in rows if row["staleness"] == staleness]
        ratios = sorted(row["ratio"] for row in mine)
        medians = {name: statistics.median(row[name] for row in mine) for name in ("without", "with", "ratio")}
        found.append({"staleness": staleness, **medians, "least": ratios[0], "most": ratios[-1], "n": len(mine)})
    return found


def show(report: dict[str, Any]) -> None:
    print(
        f"{report['workers']} workers, {report['servers']} server(s); a step pauses {report['pause_ms']:g} ms, "
        f"of the slow worker {report['factor']} times as long"
    )
    print("staleness   steps/s without   with a slow worker   ratio (least to most)   rounds")
    for row in report["summary"]:
        name = "none" if row["staleness"] is None else str(row["staleness"])
        between = f"{row['ratio']:.2f} ({row['least']:.2f} to {row['most']:.2f})"
        print(f"{name:>9}   {row['without']:>15.1f}   {row['with']:>18.1f}   {between:>21}   {row['n']:>6}")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine.parameter_server", description="Parameter servers with a slow worker."
    )
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--factor", type=int, default=5, help="how many times as long the slow worker pauses")
    parser.add_argument("--pause", type=float, default=30.0, help="milliseconds of a step")
    parser.add_argument("--steps", type=int, default=50, help="steps that are measured each time")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--report", type=Path, help="writes the figures there, as JSON")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.workers < 2:
        parser.error("--workers: one that is slow, and others")
    if not arguments.rank:
        ranks = ["-np", str(arguments.workers + arguments.servers), "--servers", str(arguments.servers)]
        command = [sys.executable, "-m", "benchmarks.engine.parameter_server", *sys.argv[1:], "--rank"]
        return subprocess.run([sys.executable, "-m", "collective_core.launch", *ranks, *command], check=False).returncode
    found = measure(arguments)
    if found:
        settings = {"workers": arguments.workers, "servers": arguments.servers, "factor": arguments.factor, "pause_ms": arguments.pause}
        report = {**settings, "steps": arguments.steps, "summary": summary(found["rounds"]), **found}
        show(report)
        if arguments.report:
            arguments.report.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
