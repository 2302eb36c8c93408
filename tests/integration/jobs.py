"""Jobs on sandbox hosts: programs that wait to be disturbed, and what is left of a job."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from hosts import Running, marked_processes, root, running

from provision.sandbox import Sandbox

WAITS = """
import time
import numpy
import collective_core as cc
cc.init()
for step in range(100000):
    cc.allreduce(numpy.ones(4))
    if step == 5:
        print(f"rank {cc.rank()} is at work", flush=True)
    time.sleep(0.05)
"""


@contextlib.contextmanager
def at_work(cluster: Sandbox, work: Path, launcher: str = "own", *options: str) -> Iterator[Running]:
    """A job on all hosts, all four ranks in the middle of it."""
    (work / "waits.py").write_text(WAITS)
    with running("run", "--launcher", launcher, *options, "--hosts", str(cluster.inventory), "python", "waits.py") as run:
        for _ in range(4):
            run.wait_for("is at work")
        yield run


def processes_of_jobs(cluster: Sandbox) -> list[str]:
    """What is left of jobs: processes with a run's mark, and on hosts all of the engine's environment."""
    looks = [root(host, "pgrep -af '^/opt/provision/venv/' || true") for host in cluster.hosts]
    return [*marked_processes(cluster), *(line for look in looks for line in look.splitlines())]


#: What a job, or Open MPI, puts outside of homes.
LEFT = "ls -d /tmp/provision-* /tmp/ompi* /dev/shm/* 2>/dev/null || true"


def folders_of_jobs(cluster: Sandbox) -> list[str]:
    return [line for host in cluster.hosts for line in root(host, LEFT).splitlines()]
