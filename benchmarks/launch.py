"""How long it takes from the command to the first collective, and to the end, by who starts the ranks: ours, mpirun, torchrun.

Run by `make bench`, on this machine alone. All launchers run the same program on the engine of `.venv-engine`, and take turns, so that
whatever else the machine does meets them all. The bar is ours: the first collective 2 s after the command with four ranks on one host.

`--many 64` instead starts so many ranks once by each of our two ways, and says how long that takes and what it needs of the machine: the
open files of the process that has most of them, and by how much the available memory falls.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ENGINE = Path(__file__).resolve().parent.parent / ".venv-engine" / "bin"
#: Seconds from the command to the first collective at four ranks on one host.
BAR = 2.0
#: Seconds from the command to its end for many ranks.
MANY_BAR = 60.0
#: Rank 0 says when the first collective was done, by the clock that all processes of a machine share.
PROGRAM = """
import time
import numpy
import collective_core as cc
cc.init()
cc.allreduce(numpy.ones(1))
if cc.rank() == 0:
    print(f"FIRST {time.monotonic()}", flush=True)
cc.shutdown()
"""
OURS, ALONE = "provision run --gloo", "python -m collective_core.launch"


def commands(np: int, program: str) -> dict[str, list[str]]:
    """By name, the command lines that start ``np`` ranks of the program."""
    python = str(ENGINE / "python")
    run = [sys.executable, "-m", "provision", "run", "--gloo", "--python", python, "-np", str(np), "-H", f"localhost:{np}"]
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return {
        OURS: [*run, "python", program],
        ALONE: [python, "-m", "collective_core.launch", "-np", str(np), "python", program],
        "mpirun": [str(ENGINE / "mpirun"), *as_root, "--oversubscribe", "--bind-to", "none", "-np", str(np), python, program],
        "torchrun": [str(ENGINE / "torchrun"), "--standalone", "--nproc-per-node", str(np), program],
    }


def measure(command: list[str]) -> tuple[float, float]:
    """Seconds to the first collective, and to the end of the command, which must succeed."""
    began = time.monotonic()
    # As users have it: what was compiled once is kept.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**environment, "OMP_NUM_THREADS": "1"})
    took = time.monotonic() - began
    said = done.stdout + done.stderr
    if done.returncode != 0 or "FIRST " not in said:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{said[-3000:]}")
    return float(said.split("FIRST ", 1)[1].split()[0]) - began, took


def tree(pid: int) -> list[int]:
    """A process and all that descend from it."""
    try:
        lists = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return []
    return [pid, *(each for found in lists for child in found for each in tree(int(child)))]


def open_files(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


def available_mb() -> int:
    """Memory that programs could still have."""
    return next(int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable")) // 1024


def many(np: int, todo: dict[str, list[str]]) -> int:
    """Start ``np`` ranks by each command; print what it took. 0 when all is within the bar."""
    limit, good = resource.getrlimit(resource.RLIMIT_NOFILE)[0], True
    for name, command in todo.items():
        before, over = available_mb(), threading.Event()
        most = {"files": 0, "memory": 0}

        def look(most: dict[str, int] = most, over: threading.Event = over, before: int = before) -> None:
            while not over.wait(0.3):
                most["files"] = max(most["files"], *(open_files(pid) for pid in tree(os.getpid())))
                most["memory"] = max(most["memory"], before - available_mb())

        watching = threading.Thread(target=look)
        watching.start()
        try:
            first, whole = measure(command)
        finally:
            over.set()
            watching.join()
        good = good and whole <= MANY_BAR
        took = f"first collective {first:.1f} s, end {whole:.1f} s (aim: {MANY_BAR:g} s)"
        needed = f"at most {most['files']} open files in a process (limit {limit}), {most['memory']} MB of memory"
        print(f"{np} ranks by {name}: {took}; {needed}", flush=True)
    return 0 if good else 1


def main() -> int:
    """Measure, print, and hold against the bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-np", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--many", type=int, metavar="N", help="so many ranks once, by our launchers alone, and what they need")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PROVISION_HOME"] = folder
        program = Path(folder) / "program.py"
        program.write_text(PROGRAM, encoding="utf-8")
        if wanted.many:
            return many(wanted.many, {name: words for name, words in commands(wanted.many, str(program)).items() if name in (OURS, ALONE)})
        todo = commands(wanted.np, str(program))
        for command in todo.values():
            measure(command)  # from the disk into memory
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in todo}
        for _ in range(wanted.rounds):
            for name, command in todo.items():
                times[name].append(measure(command))
    print(f"{wanted.np} ranks on this machine ({os.cpu_count()} processors), seconds, median (least–most) of {wanted.rounds}:")
    for name, found in times.items():
        first, whole = ([each[at] for each in found] for at in (0, 1))
        print(
            f"  {name:34} first collective {statistics.median(first):5.2f} ({min(first):.2f}–{max(first):.2f}), "
            f"end {statistics.median(whole):5.2f} ({min(whole):.2f}–{max(whole):.2f})"
        )
    good = statistics.median([first for first, _ in times[OURS]]) <= BAR
    print(f"  {OURS}: {'within' if good else 'more than'} the {BAR:g} s aimed at")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
