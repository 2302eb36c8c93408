"""Time and memory of `provision plan` for ten thousand generated hosts, as text and as JSON, with few facts and with all of a survey.

Run by `make bench`. Prints one line per run and exits 1 if one takes more than its limits: 10 s and 500 MB, with all facts 800 MB.
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
from typing import Any

MAX_SECONDS, MAX_MB, MAX_MB_OF_ALL_FACTS = 10.0, 500.0, 800.0

SYSTEMS = [("ubuntu", "22.04"), ("ubuntu", "24.04"), ("debian", "12"), ("debian", "13"), ("rocky", "9.4")]
DRIVERS = [("535.104.05", "12.2"), ("545.23.08", "12.3"), ("550.54.15", "12.4"), ("570.124.06", "12.8"), ("575.57.08", "12.9")]
GPUS = [("NVIDIA A100-SXM4-80GB", "8.0"), ("NVIDIA RTX A6000", "8.6"), ("NVIDIA L4", "8.9"), ("NVIDIA H100 80GB HBM3", "9.0")]


def facts(count: int) -> dict[str, Any]:
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


def surveyed(document: dict[str, Any]) -> dict[str, Any]:
    """The same hosts with some 11 kB of facts each: what hosts have in common, and what differs (hardware, keys, addresses)."""
    common: dict[str, Any] = {
        "packages": {f"library{number}-dev": f"{number}.{number}.1-2" for number in range(100)},
        "linker": {"cache": {f"lib{number}.so.{number}": [f"/usr/lib/x86_64-linux-gnu/lib{number}.so.{number}"] for number in range(30)}},
        "signs": {"modes": {f"/etc/ssh/file{number}": "0644" for number in range(10)}, "listening": list(range(20, 60))},
        "limits": {name: {"soft": 1024, "hard": "unlimited"} for name in ("nofile", "memlock", "nproc", "stack")},
    }
    for number, (name, host) in enumerate(document["hosts"].items()):
        host |= common | {"machine_id": f"{number:032x}", "boot_id": f"{number:032x}", "time": {"epoch": 1.7e9 + number}}
        host["ssh"] = {"ports": [22], "host_keys": [f"{kind} {name:A>900}" for kind in ("ssh-ed25519", "ssh-rsa", "ecdsa-sha2-nistp256")]}
        host["gpus"] = [{**gpu, "uuid": f"GPU-{number:032x}-{index}", "pci": f"{index:08x}"} for index, gpu in enumerate(host["gpus"])]
        host["infiniband"] = [{"device": f"mlx5_{port}", "port": 1, "state": "active", "link_layer": "InfiniBand"} for port in range(8)]
    return document


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
        known, all_known, inventory = (Path(folder) / name for name in ("facts.json", "all.json", "hosts.ini"))
        document = facts(count)
        known.write_text(json.dumps(document), encoding="utf-8")
        inventory.write_text("\n".join(document["hosts"]) + "\n", encoding="utf-8")
        all_known.write_text(json.dumps(surveyed(document)), encoding="utf-8")
        size_kb = all_known.stat().st_size / count / 1000
        for name, arguments, most_mb in (
            ("with an inventory, as text", [str(inventory), "--facts", str(known)], MAX_MB),
            ("with an inventory, --json", [str(inventory), "--json", "--facts", str(known)], MAX_MB),
            ("facts alone, --json", ["--json", "--facts", str(known)], MAX_MB),
            (
                f"all facts ({size_kb:.0f} kB), --json",
                ["--json", "--facts", str(all_known)],
                MAX_MB_OF_ALL_FACTS,
            ),
        ):
            status, seconds, computing, megabytes = measured(["plan", *arguments])
            met = status == 0 and seconds <= MAX_SECONDS and megabytes <= most_mb
            good &= met
            missed = "" if met else f"   MISSED: the limit is {MAX_SECONDS:.0f} s and {most_mb:.0f} MB, exit status {status}"
            print(
                f"provision plan, {count} hosts, {name:27} {seconds:6.2f} s (CPU {computing:.2f} s) {megabytes:6.0f} MB{missed}",
                flush=True,
            )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
