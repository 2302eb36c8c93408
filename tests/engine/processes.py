"""Running processes, for tests that a job leaves none behind."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

#: Seconds after the end of a job in which its processes must have ended.
GONE = 5.0
#: Seconds for a process to start, on a busy machine.
STARTED = 15.0
#: A launcher that waits for seconds where it would for 45 and 60: for a rank that is stopped, for itself, and for a host's system.
IMPATIENT = [
    sys.executable,
    "-c",
    "import sys; from collective_core.launch import __main__, processes; processes.STOPPED_RANK, processes.STOPPED_LAUNCHER = 1.0, 2.0; "
    "__main__.SSH = (*__main__.SSH[:3], '-o', 'ServerAliveInterval=1', '-T'); sys.exit(__main__.main())",
]


def state_of(pid: int) -> str:
    """As /proc has it; empty when the process is gone."""
    return _stat_of(pid)[0]


def parent_of(pid: int) -> int:
    return int(_stat_of(pid)[1])


def _stat_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["", "0"]


def children_of(pid: int) -> list[int]:
    """All that a process has started, and what those have, which still have their parents."""
    parents = {each: parent_of(each) for each in map(int, filter(str.isdigit, os.listdir("/proc")))}
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found[1:]


def signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


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
