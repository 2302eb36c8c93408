"""Processes, sockets and files that a job has left behind, also while other tests run."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

#: The environment variable by which a job's processes are known.
MARK = "TEST_JOB"


def processes_marked(mark: str) -> set[int]:
    """Processes whose environment names this job."""
    wanted = f"{MARK}={mark}".encode()
    found = set()
    for place in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in place.read_bytes().split(b"\0"):
                found.add(int(place.parent.name))
        except OSError:
            continue  # it has ended meanwhile
    return found


def own_sockets() -> set[str]:
    """Names of the engine's unix sockets that this process has open."""
    held = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            held.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:
            continue  # the descriptor of this listing
    fields = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {line[7] for line in fields if len(line) > 7 and line[7].startswith("@collective-core-") and f"socket:[{line[6]}]" in held}


def files() -> set[str]:
    """Files that could be a rank's. The engine creates none, so other tests cannot interfere."""
    places = [Path("/dev/shm"), Path(tempfile.gettempdir())]
    return {str(p) for place in places for pattern in ("*collective*", "*cc_*", "memfd*") for p in place.glob(pattern)}
