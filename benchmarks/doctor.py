#!/usr/bin/env python3
"""How fast `provision doctor --log` reads, and how much memory it takes: seven kinds of logs, each read as a user would.

    .venv/bin/python benchmarks/doctor.py [MEGABYTES [KIND …]]

usual: NCCL's INFO lines and a training loop, whose lines differ in their numbers only, with an error near the end.
varied: every third line is words in an order of its own, so that hardly a line was seen before.
pointers: NCCL's INFO lines with pointers and ids in hexadecimal, no two alike.
troubled: one line in a hundred is an error or a warning.
dense: every line is an error or a warning, and no two are alike.
hostile: lines of the words that a pattern needs, over and over, for each pattern in turn.
one_line: ten times as much, in a single line of words.
"""

from __future__ import annotations

import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

from provision.diagnosis.logs.words import required_words
from provision.diagnosis.signatures import all_signatures, error_shapes, harmless

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


def pointers(dice: random.Random, number: int) -> str:
    comm, commit = dice.getrandbits(48), dice.getrandbits(64)
    where = f"node1:71:88 [{number % 8}] NCCL INFO"
    if number % 2:
        return f"{where} ncclCommInitRank comm {comm:#x} rank {number % 8} nranks 8 cudaDev 1 busId c000 commId {commit:#x} - Init COMPLETE"
    return f"{where} AllReduce: opCount {number:x} sendbuff {comm:#x} recvbuff {commit:#x} count 1024 datatype 7 op 0 root 0 comm {comm:#x}"


def troubled(dice: random.Random, number: int) -> str:
    return usual(dice, number) if number % 100 else f"[1,{number % 8}]<stderr>:{TROUBLE[number // 100 % len(TROUBLE)]}"


def dense(dice: random.Random, number: int) -> str:
    return f"{TROUBLE[number % len(TROUBLE)]} " + "".join(dice.choice("ghijkqxz") for _ in range(9))


@cache
def _needed() -> list[str]:
    """The words that each pattern needs."""
    patterns = [pattern for each in all_signatures().values() for pattern in each.patterns]
    patterns += [pattern for each in (*harmless(), *error_shapes()) for pattern in each.patterns]
    return [" ".join(min(words, key=len) for words in required_words(pattern)) + " " for pattern in patterns]


def hostile(dice: random.Random, number: int) -> str:
    words = _needed()[number % len(_needed())]
    return "".join(dice.choice("ghijkqxz") for _ in range(9)) + " " + words * (dice.randrange(20, 4000) // len(words))


def make(path: Path, megabytes: int, line: Callable[[random.Random, int], str], end: str = "\n") -> None:
    dice, number = random.Random(1), 0  # noqa: S311  a log, no secret
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < megabytes << 20:
            file.write("".join(line(dice, number + index) + end for index in range(500)))
            number += 500
        file.write("\n[1,3]<stderr>:torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n")


def one_line(dice: random.Random, number: int) -> str:
    return varied(dice, 3 * number)


def _cpu_seconds() -> float:
    """Of the programs that have ended; on a busy machine it is more reliable than the clock."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    kinds = {kind.__name__: kind for kind in (usual, varied, pointers, troubled, dense, hostile, one_line)}
    print(f"{'log':10} {'MB':>6} {'seconds':>8} {'MB/s':>6} {'CPU s':>6} {'peak MB':>8}   (all with the start of the program)")
    for name in sys.argv[2:] or kinds:
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "job.log"
            make(log, megabytes * (10 if name == "one_line" else 1), kinds[name], " " if name == "one_line" else "\n")
            size = log.stat().st_size / 1e6
            before = _cpu_seconds()
            began = time.perf_counter()
            command = [sys.executable, "-c", _MEASURED, str(log)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            seconds = time.perf_counter() - began
            if "cuda-oom" not in done.stdout:
                sys.exit(f"the error at the end was not found:\n{done.stdout}{done.stderr}")
            peak = int(done.stderr.split()[-1]) / 1024
            print(f"{name:10} {size:6.0f} {seconds:8.2f} {size / seconds:6.0f} {_cpu_seconds() - before:6.2f} {peak:8.0f}", flush=True)


# The program as a user runs it, which then says its peak of memory.
_MEASURED = """
import resource, sys
from provision.cli.main import main
sys.argv = ["provision", "doctor", "--log", sys.argv[1]]
try:
    main()
finally:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
"""


if __name__ == "__main__":
    main()
