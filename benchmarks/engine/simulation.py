"""Steps, bytes and time of operations among many hosts, on one core: simulated, by the engine's own code.

    python -m benchmarks.engine.simulation --hosts 8,64,1000 --ranks 8 allreduce:4096 barrier:0

``csrc/tests/simulate.cpp`` runs the real negotiation and algorithms, every rank a fiber of one thread, over a network that is a cost model.
Steps (messages that follow each other on the longest way), messages and bytes are exact, and results are checked. Time is

    a hop per step, bytes / bandwidth of what a host sends or receives, one message after the other, and what a message costs its sender

with ``--hop-us``, ``--gbs`` and ``--message-us``, all of them assumed. What a rank computes, and waits for in its own host, is left out.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple, Sequence

from .report import columns, duration

ENGINE = Path(__file__).resolve().parents[2] / "collective_core"
PROGRAM = "collective_core_simulate"


class Cost(NamedTuple):
    """Of the network: what a hop and a message take, and bytes per nanosecond each way."""

    hop_us: float = 15.0
    gbs: float = 12.5
    message_us: float = 1.0


ASSUMED = Cost()


class Simulated(NamedTuple):
    """One operation: its steps, time, and what all hosts together and the busiest one have sent."""

    hosts: int
    operation: str
    size: int  # bytes of a rank's tensor
    steps: int
    microseconds: float
    messages: int
    bytes: int
    most_messages: int
    most_bytes: int


def build(folder: Path) -> Path:
    """The program, compiled in ``folder``. Raises ``CalledProcessError``, and ``FileNotFoundError`` without CMake."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    cmake = shutil.which("cmake", path=path)
    if cmake is None:
        raise FileNotFoundError("no cmake found: `make engine` installs it")
    subprocess.run([cmake, "-S", str(ENGINE), "-B", str(folder), "-DCOLLECTIVE_SELFTEST=ON"], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([cmake, "--build", str(folder), "--target", PROGRAM, "--parallel", "2"], check=True, stdout=subprocess.DEVNULL)
    return folder / PROGRAM


def simulate(program: Path, hosts: int, ranks: int, operations: Sequence[tuple[str, int]], cost: Cost = ASSUMED) -> list[Simulated]:
    """``operations``: kind and bytes of a rank's tensor of float32. ``ranks``: per host.

    Raises ``RuntimeError`` with what the program says where a result is wrong or ranks wait in vain.
    """
    words = [str(number) for number in (hosts, ranks, *cost)] + [str(word) for operation in operations for word in operation]
    done = subprocess.run([str(program), *words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stdout}{done.stderr}")
    found = []
    for line in done.stdout.splitlines():
        name, size, steps, microseconds, *sent = line.split()
        found.append(Simulated(hosts, name, int(size), int(steps), float(microseconds), *map(int, sent)))
    return found


def table(found: Sequence[Simulated], ranks: int) -> list[str]:
    """Lines of a table: an operation and a number of hosts each."""
    rows: list[tuple[str, ...]] = [("operation", "bytes", "hosts x ranks", "steps", "time", "messages of a host", "bytes of a host")]
    for one in found:
        place = f"{one.hosts} x {ranks}"
        time = duration(one.microseconds)
        rows.append((one.operation, str(one.size), place, str(one.steps), time, str(one.most_messages), str(one.most_bytes)))
    return columns(rows)


def _operation(text: str) -> tuple[str, int]:
    name, _, size = text.partition(":")
    return name, int(size)


def main() -> int:
    """Build the program, simulate, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operations", nargs="*", metavar="KIND:BYTES", type=_operation, help="allreduce:4096 and barrier:0 by default")
    parser.add_argument("--hosts", default="8,16,32,64", help="numbers of hosts (%(default)s)")
    parser.add_argument("--ranks", type=int, default=8, help="per host (%(default)s)")
    parser.add_argument("--hop-us", type=float, default=ASSUMED.hop_us, help="of a message between hosts (%(default)g)")
    parser.add_argument("--gbs", type=float, default=ASSUMED.gbs, help="GB/s of a host's network each way (%(default)g)")
    parser.add_argument("--message-us", type=float, default=ASSUMED.message_us, help="that a message costs its sender (%(default)g)")
    parser.add_argument("--build", type=Path, default=ENGINE / "build" / "simulation", help="folder for the program (%(default)s)")
    wanted = parser.parse_args()
    cost = Cost(wanted.hop_us, wanted.gbs, wanted.message_us)
    operations = wanted.operations or [("allreduce", 4096), ("barrier", 0)]
    program = build(wanted.build)
    found = [one for hosts in wanted.hosts.split(",") for one in simulate(program, int(hosts), wanted.ranks, operations, cost)]
    print(f"{cost.hop_us:g} us a hop, {cost.gbs:g} GB/s of a host each way, {cost.message_us:g} us a message: assumed")
    print("\n".join(table(sorted(found, key=lambda one: (one.operation, one.size)), wanted.ranks)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
