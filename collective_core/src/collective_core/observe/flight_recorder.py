"""The flight recorder: where a rank keeps its last operations, and how they are shown (``python -m collective_core.flight``).

With COLLECTIVE_FLIGHT_RECORDER=DIRECTORY every rank keeps its last operations in a file there, which is complete at every
moment, also after SIGKILL. A file stays until it is removed or the same rank of another job overwrites it; in an elastic job every
generation of ranks has its own.
"""

from __future__ import annotations

import datetime
import os
import re

from collective_core.observe import recorder


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
