"""How many cores a rank computes on: those that its host gives this job, divided by the ranks there.

Libraries of numbers start a thread per core of the machine in every process, so ranks of one host slow each other down, most of all in a
container that may use a few of the cores. Every launcher sets OMP_NUM_THREADS for its ranks by this one rule, unless somebody has set it.

mpirun cannot; there this file runs before the program, in each rank: ``python cores.py PROGRAM …``. It imports nothing of the package,
whose libraries would take their time.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Iterator, MutableMapping

VARIABLE = "OMP_NUM_THREADS"
#: Of Open MPI: ranks on this host.
_LOCAL_SIZE = "OMPI_COMM_WORLD_LOCAL_SIZE"
#: A folder of a control group → its quota in cores. The first is version 2's file, the others are version 1's.
_V2, _V1_QUOTA, _V1_PERIOD = "cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us"


def limit(variables: MutableMapping[str, str], ranks: int, starter: int = 0) -> None:
    """Sets OMP_NUM_THREADS for one of ``ranks`` on this host that ``starter`` (a process, 0: this one) starts; a value there stays."""
    if not variables.get(VARIABLE):
        variables[VARIABLE] = str(share(ranks, starter))


def share(ranks: int, starter: int = 0) -> int:
    """The starter's cores and the quota of its control group, divided; no more than this process is bound to, and at least 1."""
    cores = min(len(os.sched_getaffinity(starter)), quota(starter or os.getpid()))
    return max(1, min(len(os.sched_getaffinity(0)), int(cores / max(1, ranks))))


def quota(process: int, root: Path = Path("/")) -> float:
    """Cores that the control group of a process may use, by the narrowest limit on the way to its root; infinite without one.

    ``root``: above ``proc``, and above where the groups are mounted.
    """
    found = [float("inf")]
    for folder, top in _groups(process, root):
        while True:
            found.append(_quota_of(folder))
            if folder == top or top not in folder.parents:
                break
            folder = folder.parent
    return min(found)


def _groups(process: int, root: Path) -> Iterator[tuple[Path, Path]]:
    """(the group's folder, where its hierarchy is mounted) for those that may limit cores."""
    try:
        memberships = (root / f"proc/{process}/cgroup").read_text().splitlines()
        mounts = (root / f"proc/{process}/mountinfo").read_text().splitlines()
    except OSError:
        return
    paths = {controllers: path for _, controllers, path in (line.split(":", 2) for line in memberships)}
    for mount in mounts:
        before, _, after = mount.partition(" - ")
        _, _, _, begins_at, mount_point, *_ = before.split(" ")
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup2":
            path = paths.get("")
        elif kind == "cgroup" and "cpu" in options.split(","):
            path = next((path for controllers, path in paths.items() if "cpu" in controllers.split(",")), None)
        else:
            continue
        if path is not None:
            top = root / mount_point.lstrip("/")
            # A container may see its own group as the root of what is mounted there, and its path as the host sees it.
            begin = begins_at.rstrip("/")
            below = path[len(begin) :] if f"{path}/".startswith(f"{begin}/") else ""
            yield top / below.lstrip("/"), top


def _quota_of(folder: Path) -> float:
    try:
        if (folder / _V2).exists():
            allowed, period = (folder / _V2).read_text().split()
        else:
            allowed, period = (folder / _V1_QUOTA).read_text(), (folder / _V1_PERIOD).read_text()
        return int(allowed) / int(period) if int(allowed) > 0 else float("inf")
    except (OSError, ValueError, ZeroDivisionError):  # the group is gone, or its quota is the word "max"
        return float("inf")


def launcher() -> int:
    """The process that started this rank under mpirun: not bound to the rank's cores, as what the rank itself has started may be."""
    process = os.getppid()
    while _is_of_rank(process):
        process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return process


def _is_of_rank(process: int) -> bool:
    try:
        return any(entry.startswith(f"{_LOCAL_SIZE}=".encode()) for entry in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"))
    except OSError:  # another user's
        return False


def main() -> None:
    limit(os.environ, int(os.environ.get(_LOCAL_SIZE, "1")), launcher())
    try:
        os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606 - the user's program
    except OSError as error:
        print(f"{sys.argv[1]} cannot be started: {error.strerror}", file=sys.stderr)
        sys.exit(127)  # as a shell has it


if __name__ == "__main__":
    main()
