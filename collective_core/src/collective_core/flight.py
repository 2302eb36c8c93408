"""Prints what the ranks of a job did last: ``python -m collective_core.flight DIRECTORY``.

With COLLECTIVE_FLIGHT_RECORDER=DIRECTORY every rank keeps its last operations in a file there, which is complete at every
moment, also after SIGKILL. A file stays until it is removed or the same rank of another job overwrites it; in an elastic job every
generation of ranks has its own.
"""

from __future__ import annotations

import argparse
import datetime
import glob
import os
import re
import sys
from typing import Sequence

from collective_core import recorder
from collective_core.errors import CollectiveError


def path_of(directory: str, rank: int, generation: int = 0) -> str:
    """The file of a rank. ``generation``: of an elastic job, 0 in others."""
    return os.path.join(directory, f"rank-{rank:04d}" + (f".generation-{generation:04d}" if generation else "") + ".flight")


def generation_of(path: str) -> int:
    """The generation in a file's name."""
    match = re.search(r"\.generation-(\d+)\.flight$", path)
    return int(match[1]) if match else 0


def describe(recording: recorder.Recording, last: int, generation: int = 0) -> list[str]:
    """The last operations of one rank, a line each."""
    begin = f"generation {generation}, " if generation else ""
    lines = [
        f"{begin}rank {recording.rank} of {recording.size} (host {recording.host_name}, pid {recording.pid}): {recording.begun} operations"
    ]
    for event in recording.events[-last:]:
        began = datetime.datetime.fromtimestamp((recording.real + event.started - recording.monotonic) / 1e9)
        if event.state == "running":
            ending = "waits for other ranks" if not event.agreed else "transfers"
        else:
            ending = f"{event.state} after {(event.ended - event.started) / 1e6:.3f} ms"
        where = f" in process set {event.process_set}" if event.process_set else ""
        size = f" ({event.dtype}, {event.bytes} bytes)" if event.kind not in ("barrier", "join") else ""
        lines.append(f"  {began:%H:%M:%S.%f} #{event.number} {event.kind} '{event.name}'{size}{where}: {ending}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m collective_core.flight", description="What the ranks of a job did last.")
    parser.add_argument("directory", help="that COLLECTIVE_FLIGHT_RECORDER named")
    parser.add_argument("--last", type=int, default=5, metavar="N", help="operations per rank (5)")
    options = parser.parse_args(arguments)
    paths = sorted(sorted(glob.glob(os.path.join(options.directory, "rank-*.flight"))), key=generation_of)
    if not paths:
        print(f"no flight recorder in {options.directory}", file=sys.stderr)
        return 2
    try:
        for path in paths:
            print("\n".join(describe(recorder.read_file(path), options.last, generation_of(path))))
    except (CollectiveError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
