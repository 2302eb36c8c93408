"""Self check: ``mpirun -np 4 python -m collective_core.check [--json] [--report FILE]``.

Every rank runs every collective on several types and sizes and compares with what NumPy computes. Rank 0 prints one summary.
Exit status 0: all well; 1: a result was wrong or a collective failed. Works without PyTorch.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import numpy as np

import collective_core as cc
from collective_core import _native
from collective_core.runtime import membership

SCHEMA = 1
#: Elements: nothing, one, odd, just past the payload that travels inline, and longer than any chunk buffer.
SIZES = (0, 1, 1031, 70_001, 1_500_007)
TYPES = ("float32", "float64", "float16", "int32", "int64", "uint8")


def pattern(rank: int, count: int, dtype: str) -> np.ndarray[Any, Any]:
    """Values that differ between ranks and elements, and are exact in every type."""
    return ((np.arange(count, dtype=np.int64) * 7 + rank * 3) % 11).astype(dtype)


def expected_sum(size: int, count: int, dtype: str) -> np.ndarray[Any, Any]:
    wide = sum(pattern(r, count, "int64") for r in range(size))
    return np.asarray(wide).astype(dtype)


def check_all(seed: int = 0) -> list[str]:
    """Runs everything once; returns the names of the checks that failed on this rank."""
    rank, size = cc.rank(), cc.size()
    wrong: list[str] = []

    def compare(what: str, got: np.ndarray[Any, Any], want: np.ndarray[Any, Any]) -> None:
        if got.dtype != want.dtype or got.shape != want.shape or got.tobytes() != want.tobytes():
            wrong.append(what)

    for dtype in TYPES:
        for count in SIZES:
            label = f"{dtype}[{count}]"
            mine = pattern(rank, count, dtype)
            compare(f"allreduce {label}", cc.allreduce(mine, op=cc.Sum), expected_sum(size, count, dtype))
            root = (count + seed) % size
            compare(f"broadcast {label}", cc.broadcast(mine, root), pattern(root, count, dtype))
            rows = count // size + rank  # a different number on every rank
            blocks = [pattern(r, count // size + r, dtype) for r in range(size)]
            compare(f"allgather {label}", cc.allgather(pattern(rank, rows, dtype)), np.concatenate(blocks))
    cc.barrier()
    return wrong


def transport() -> str:
    member = membership.current()
    if member.size == 1:
        return "none"
    parts = []
    if member.local_size > 1:
        parts.append("shared memory")
    if len({peer.host_id for peer in member.peers}) > 1:
        parts.append("tcp")
    return " + ".join(parts)


def report(failures: list[str], seconds: float) -> dict[str, Any]:
    """The document that ``--json`` prints."""
    hosts: dict[str, dict[str, Any]] = {}
    for peer in membership.current().peers:
        host = hosts.setdefault(peer.host_id, {"host": peer.host_name, "address": peer.address or None, "ranks": []})
        host["ranks"].append(peer.rank)
    return {
        "schema": SCHEMA,
        "ok": not failures,
        "version": cc.__version__,
        "library_version": _native.library().cc_version().decode(),
        "kernels": _native.library().cc_kernels().decode(),
        "size": cc.size(),
        "hosts": list(hosts.values()),
        "transport": transport(),
        "single_copy": _native.uses_cross_memory_attach(),
        "seconds": round(seconds, 3),
        "failures": failures,
    }


def print_plainly(document: dict[str, Any]) -> None:
    hosts = ", ".join(f"{h['host']} ({len(h['ranks'])})" for h in document["hosts"])
    print(f"collective_core {document['version']} ({document['kernels']} kernels): {document['size']} ranks on {hosts}")
    forbidden = "" if document["single_copy"] else ": the system or a setting forbids to reach another rank's memory"
    copies = f"{'one copy' if document['single_copy'] else 'two copies'} of a large allgather or reduce-scatter{forbidden}"
    beside = f" ({copies})" if "shared memory" in document["transport"] else ""
    print(f"transport: {document['transport']}{beside}; checked in {document['seconds']} s")
    for failure in document["failures"]:
        print(f"WRONG: {failure}")
    print("all collectives correct" if document["ok"] else "the engine does NOT work here")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m collective_core.check", description="Checks the engine on all ranks.")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--report", metavar="FILE", help="rank 0 writes the JSON document there")
    arguments = parser.parse_args()
    try:
        cc.init()
        started = time.monotonic()
        mine = check_all()
        everyone = cc.allgather(np.frombuffer(json.dumps([f"rank {cc.rank()}: {w}" for w in mine]).encode() + b"\n", dtype=np.uint8))
        seconds = time.monotonic() - started
    except cc.CollectiveError as error:
        print(f"collective_core.check: {error}", file=sys.stderr)
        return 1
    failures = [f for line in everyone.tobytes().decode().splitlines() for f in json.loads(line)]
    if cc.rank() == 0:
        document = report(failures, seconds)
        if arguments.report:
            with open(arguments.report, "w", encoding="utf-8") as file:
                json.dump(document, file, indent=2)
        if arguments.json:
            print(json.dumps(document, indent=2))
        else:
            print_plainly(document)
    cc.shutdown()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
