"""Running processes, for tests that a job leaves none behind."""

from __future__ import annotations

import time
from pathlib import Path

#: Seconds after the end of a job in which its processes must have ended.
GONE = 5.0
#: Seconds for a process to start, on a busy machine.
STARTED = 15.0


def processes_with(mark: str) -> list[str]:
    """Command lines of processes that contain the mark."""
    found = []
    for place_ in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = place_.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if mark in words and "pytest" not in words:
            found.append(words)
    return found


def wait_until_gone(mark: str) -> list[str]:
    end = time.monotonic() + GONE
    while processes_with(mark) and time.monotonic() < end:
        time.sleep(0.05)
    return processes_with(mark)


def wait_for(mark: str, count: int) -> bool:
    """Whether so many run, now or soon: a process that has just started may not have its command line yet."""
    end = time.monotonic() + STARTED
    while len(processes_with(mark)) < count and time.monotonic() < end:
        time.sleep(0.05)
    return len(processes_with(mark)) >= count
