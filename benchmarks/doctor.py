#!/usr/bin/env python3
"""How fast `provision doctor --log` reads, and how much memory it takes: four kinds of logs, each read as a user would.

    .venv/bin/python benchmarks/doctor.py [MEGABYTES]

usual: NCCL's INFO lines and a training loop, whose lines differ in their numbers only, with an error near the end.
varied: every third line is words in an order of its own, so that hardly a line was seen before.
troubled: one line in a hundred is an error or a warning.
dense: every line is an error or a warning, and no two are alike.
"""

from __future__ import annotations

import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

WORDS = "epoch step loss lr grad norm time data batch images/s rank node worker train val accuracy tensor model memory".split()  # noqa: SIM905
TROUBLE = ("Host key verification failed.", "NCCL WARN Call to posix_fallocate failed : No space left on device", "RuntimeError: boom")


def usual(dice: random.Random, number: int) -> str:
    if number % 3 == 0:
        process = f"node1:{dice.randrange(99999)}:{dice.randrange(99999)} [{number % 8}]"
        return f"{process} NCCL INFO Channel {number % 24:02}/24 : 0[1] -> 1[2] via P2P/IPC"
    who = f"[1,{number % 8}]<stdout>:2025-01-02 10:11:12,{number % 999:03}"
    return f"{who} INFO train.py:{number % 300} step {number} loss={dice.random():.4f}"


def varied(dice: random.Random, number: int) -> str:
    return usual(dice, number) if number % 3 else "[1,0]<stdout>:" + " ".join(dice.choice(WORDS) for _ in range(9))


def troubled(dice: random.Random, number: int) -> str:
    return usual(dice, number) if number % 100 else f"[1,{number % 8}]<stderr>:{TROUBLE[number // 100 % len(TROUBLE)]}"


def dense(dice: random.Random, number: int) -> str:
    return f"{TROUBLE[number % len(TROUBLE)]} " + "".join(dice.choice("ghijkqxz") for _ in range(9))


def make(path: Path, megabytes: int, line: Callable[[random.Random, int], str]) -> None:
    dice, number = random.Random(1), 0  # noqa: S311  a log, no secret
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < megabytes << 20:
            file.write("".join(line(dice, number + index) + "\n" for index in range(5000)))
            number += 5000
        file.write("[1,3]<stderr>:torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n")


def _cpu_seconds() -> float:
    """Of the programs that have ended; on a busy machine it is more reliable than the clock."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    print(f"{'log':10} {'MB':>6} {'seconds':>8} {'MB/s':>6} {'CPU s':>6} {'peak MB':>8}   (all with the start of the program)")
    for kind in (usual, varied, troubled, dense):
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "job.log"
            make(log, megabytes, kind)
            size = log.stat().st_size / 1e6
            before = _cpu_seconds()
            began = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-m", "provision", "doctor", "--log", str(log)], capture_output=True, text=True, check=False
            )
            seconds = time.perf_counter() - began
            if "cuda-oom" not in done.stdout:
                sys.exit(f"the error at the end was not found:\n{done.stdout}{done.stderr}")
            peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
            print(f"{kind.__name__:10} {size:6.0f} {seconds:8.2f} {size / seconds:6.0f} {_cpu_seconds() - before:6.2f} {peak:8.0f}")


if __name__ == "__main__":
    main()
