"""Time from the command to the first collective, and to the end, by launcher: ours, mpirun, torchrun.

Run by `make bench`, on this machine alone. All launchers run the same program on the engine of `.venv-engine` in turn, so that other load
of the machine meets them all. Our aim: the first collective 2 s after the command with four ranks on one host.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ENGINE = Path(__file__).resolve().parent.parent / ".venv-engine" / "bin"
#: Seconds from the command to the first collective at four ranks on one host.
AIM = 2.0
#: Rank 0 prints when the first collective was done, by the clock that all processes of a machine share.
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
OURS = "provision run --gloo"


def commands(np: int, program: str) -> dict[str, list[str]]:
    """By name, the command lines that start ``np`` ranks of the program."""
    python = str(ENGINE / "python")
    run = [sys.executable, "-m", "provision", "run", "--gloo", "--python", python, "-np", str(np), "-H", f"localhost:{np}"]
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return {
        OURS: [*run, "python", program],
        "python -m collective_core.launch": [python, "-m", "collective_core.launch", "-np", str(np), "python", program],
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
    output = done.stdout + done.stderr
    if done.returncode != 0 or "FIRST " not in output:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{output[-3000:]}")
    return float(output.split("FIRST ", 1)[1].split()[0]) - began, took


def main() -> int:
    """Measure, print, and compare with the aim."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-np", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PROVISION_HOME"] = folder
        program = Path(folder) / "program.py"
        program.write_text(PROGRAM, encoding="utf-8")
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
    good = statistics.median([first for first, _ in times[OURS]]) <= AIM
    print(f"  {OURS}: {'within' if good else 'more than'} the {AIM:g} s aimed at")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
