"""Ends every process of one run on this machine: TERM, a short grace, KILL. Python 3.6+, standard library only.

A run marks what it starts with PROVISION_RUN_ID in the environment; children inherit it, so the marker finds what a killed
ssh client or a dead controller left behind. Prints the names of what it ended, one a line. It never touches itself, its
ancestors, or a process of another run.
"""

import os
import signal
import sys
import time

GRACE_S = 15.0  # what pip, apt and a build need to put their things away, thousands of files on a busy machine


def ancestors():
    found, pid = set(), os.getpid()
    while pid > 1:
        found.add(pid)
        try:
            with open("/proc/%d/stat" % pid) as stat:
                pid = int(stat.read().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            break
    return found


def marked(run_id):
    """{pid: name} of live processes that carry the marker; processes of other users are invisible without root."""
    needle = ("PROVISION_RUN_ID=" + run_id).encode()
    spared, found = ancestors(), {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) in spared:
            continue
        try:
            with open("/proc/%s/environ" % entry, "rb") as environ:
                if needle not in environ.read().split(b"\0"):
                    continue
            with open("/proc/%s/comm" % entry) as comm:
                found[int(entry)] = comm.read().strip()
        except OSError:
            continue  # gone meanwhile, or another user's
    return found


def started(pid):
    """When, in clock ticks since boot. Parents come before children by it: who tidies up must not take its child's end for a failure."""
    try:
        with open("/proc/%d/stat" % pid) as stat:
            return int(stat.read().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0  # gone meanwhile


def signal_all(pids, number):
    for pid in pids:
        try:
            os.kill(pid, number)
        except OSError:
            continue  # gone meanwhile


def sweep(run_id):
    ended = marked(run_id)
    signal_all(sorted(ended, key=started), signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    left = marked(run_id)
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = marked(run_id)
        ended.update(left)
    signal_all(left, signal.SIGKILL)
    return ended


if __name__ == "__main__":
    for pid, name in sorted(sweep(sys.argv[1]).items()):
        print("%s (pid %d)" % (name, pid))
