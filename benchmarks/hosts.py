"""What a run costs by the number of hosts, on sandbox hosts of this machine: the first installation, a run with nothing to do, doctor.

Run by `make bench-hosts`; it needs a container engine and takes half an hour. The sides of a comparison alternate where they can be
repeated (runs with nothing to do, doctor); a first installation is done once per number of hosts. All hosts share this machine's
processors, so the ratios also show what is computed on hosts and does not overlap; the seconds of computing are printed next to them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from provision import sandbox as sandboxes
from provision.sandbox import Sandbox

#: Of a run with nothing to do, and of a first installation: how much longer it may take on the larger number of hosts.
BAR = 2.0


def run(*words: str, also: int = 0, **environment: str) -> float:
    """Seconds of ``provision WORDS…``, which must end with 0 or ``also``."""
    command, variables = [sys.executable, "-m", "provision", *words], {**os.environ, **environment}
    began = time.perf_counter()
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if done.returncode not in (0, also):
        sys.exit(f"provision {' '.join(words)} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return time.perf_counter() - began


def busy_seconds() -> float:
    """Seconds that all processors of this machine have computed since it started."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, *_ = (int(word) for word in file.readline().split()[1:])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def install(hosts: Sandbox, extra: Sequence[str]) -> tuple[float, float]:
    """Seconds of a first installation, and the seconds of computing in them."""
    busy = busy_seconds()
    with tempfile.TemporaryDirectory() as cache:  # a kept build of the engine would spare later ones theirs
        seconds = run("up", str(hosts.inventory), "--no-smoke", *extra, PROVISION_CACHE=cache)
    return seconds, busy_seconds() - busy


def main() -> int:
    """Measure, print, and hold against the bars."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, nargs=2, default=(2, 8), help="numbers of hosts for the first installation")
    parser.add_argument("--again", type=int, nargs=2, default=(2, 16), help="numbers of hosts for runs with nothing to do")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--with-torch", action="store_true", help="PyTorch too: gigabytes of disk")
    wanted = parser.parse_args()
    extra = [] if wanted.with_torch else ["--torch", "none"]
    made: dict[int, Sandbox] = {}
    first: dict[int, float] = {}
    try:
        for count in sorted({*wanted.first, *wanted.again}):
            made[count] = sandboxes.up(count=count, name=f"bench-{count}", slots=1, say=lambda _line: None)
            first[count], busy = install(made[count], extra)
            spent = f"of these {busy:.0f} s of computing on {os.cpu_count()} processors"
            print(f"first installation on {count} hosts: {first[count]:.0f} s, {spent}", flush=True)
        again: dict[int, list[float]] = {count: [] for count in wanted.again}
        doctor: dict[int, list[float]] = {count: [] for count in wanted.again}
        for _ in range(wanted.rounds):
            for count in wanted.again:
                again[count].append(run("up", str(made[count].inventory), "--no-smoke", *extra))
                doctor[count].append(run("doctor", str(made[count].inventory), also=1))  # 1: it has found something
    finally:
        for count in made:
            sandboxes.down(f"bench-{count}", say=lambda _line: None)
    few, many = wanted.first
    ratios = {f"first installation, {many} hosts compared with {few}": first[many] / first[few]}
    few, many = wanted.again
    for what, times in (("nothing to do", again), ("doctor", doctor)):
        medians = {count: statistics.median(seconds) for count, seconds in times.items()}
        for count, seconds in medians.items():
            print(f"{what} on {count} hosts: {seconds:.1f} s (median of {wanted.rounds})")
        ratios[f"{what}, {many} hosts compared with {few}"] = medians[many] / medians[few]
    for what, ratio in ratios.items():
        print(f"{what}: {ratio:.2f} x{'' if ratio <= BAR else f', more than the {BAR:g} x aimed at'}")
    return 0 if all(ratio <= BAR for ratio in ratios.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
