"""Time and memory of `provision plan` for ten thousand generated hosts, as text and as JSON.

Run by `make bench`. Prints one line per run and exits 1 if one takes more than 10 s or 500 MB.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

MAX_SECONDS, MAX_MB = 10.0, 500.0

SYSTEMS = [("ubuntu", "22.04"), ("ubuntu", "24.04"), ("debian", "12"), ("debian", "13"), ("rocky", "9.4")]
DRIVERS = [("535.104.05", "12.2"), ("545.23.08", "12.3"), ("550.54.15", "12.4"), ("570.124.06", "12.8"), ("575.57.08", "12.9")]
GPUS = [("NVIDIA A100-SXM4-80GB", "8.0"), ("NVIDIA RTX A6000", "8.6"), ("NVIDIA L4", "8.9"), ("NVIDIA H100 80GB HBM3", "9.0")]


def facts(count: int) -> dict[str, object]:
    """A facts file: hosts of mixed systems, drivers and GPUs, one in five without any; the same every time."""
    dice = random.Random(1)  # noqa: S311  no secret
    hosts = {}
    for number in range(count):
        (system, version), (driver, cuda), (gpu, capability) = dice.choice(SYSTEMS), dice.choice(DRIVERS), dice.choice(GPUS)
        bare = dice.random() < 0.2
        address = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
        hosts[f"node{number}"] = {
            "hostname": f"node{number}",
            "os": {"id": system, "version": version},
            "arch": "x86_64" if dice.random() < 0.9 else "aarch64",
            "driver": None if bare else {"version": driver, "cuda": cuda},
            "gpus": [] if bare else [{"name": gpu, "compute_capability": capability}] * 8,
            "network": {
                "interfaces": [{"name": "eth0", "addresses": [f"{address}/8"], "up": True}],
                "default_route_interface": "eth0",
            },
        }
    return {"schema": 1, "hosts": hosts}


def measured(arguments: list[str]) -> tuple[int, float, float, float]:
    """(exit status, seconds, CPU seconds, peak MB) of ``provision`` with these arguments; its output is discarded."""
    began = time.perf_counter()
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.execv(sys.executable, [sys.executable, "-m", "provision", *arguments])  # noqa: S606
    _, status, usage = os.wait4(child, 0)
    return os.waitstatus_to_exitcode(status), time.perf_counter() - began, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def main() -> int:
    """Run all forms and compare them with the limits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=10_000)
    count = parser.parse_args().hosts
    good = True
    with tempfile.TemporaryDirectory() as folder:
        known, inventory = Path(folder) / "facts.json", Path(folder) / "hosts.ini"
        document = facts(count)
        known.write_text(json.dumps(document), encoding="utf-8")
        inventory.write_text("\n".join(document["hosts"]) + "\n", encoding="utf-8")  # type: ignore[arg-type]
        for name, arguments in {
            "with an inventory, as text": [str(inventory)],
            "with an inventory, --json": [str(inventory), "--json"],
            "facts alone, --json": ["--json"],
        }.items():
            status, seconds, computing, megabytes = measured(["plan", *arguments, "--facts", str(known)])
            met = status == 0 and seconds <= MAX_SECONDS and megabytes <= MAX_MB
            good &= met
            missed = "" if met else f"   MISSED: the limit is {MAX_SECONDS:.0f} s and {MAX_MB:.0f} MB, exit status {status}"
            print(
                f"provision plan, {count} hosts, {name:27} {seconds:6.2f} s (CPU {computing:.2f} s) {megabytes:6.0f} MB{missed}",
                flush=True,
            )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
