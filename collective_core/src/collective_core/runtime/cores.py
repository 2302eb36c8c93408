"""Number of cores that a rank computes on: those that its host gives this job, divided by the ranks there.

Libraries of numbers start a thread per core of the machine in every process, so ranks of one host slow each other down, most of all in a
container that may use a few of the cores. Every launcher sets OMP_NUM_THREADS for its ranks by this one rule, unless somebody has set it.

mpirun cannot; there this file runs before the program, in each rank: ``python cores.py PROGRAM …``. It imports nothing of the package,
whose dependencies would take their time, and asks the engine's library.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import MutableMapping

VARIABLE = "OMP_NUM_THREADS"
#: Of Open MPI: ranks on this host.
_LOCAL_SIZE = "OMPI_COMM_WORLD_LOCAL_SIZE"


def limit(variables: MutableMapping[str, str], ranks: int, starter: int = 0) -> None:
    """Sets OMP_NUM_THREADS for one of ``ranks`` on this host that ``starter`` (a process, 0: this one) starts; a value there stays."""
    if not variables.get(VARIABLE):
        variables[VARIABLE] = str(share(ranks, starter))


def share(ranks: int, starter: int = 0) -> int:
    """The starter's cores and the quota of its control group, divided; no more than this process is bound to, and at least 1."""
    cores = min(len(os.sched_getaffinity(starter)), quota(starter or os.getpid()))
    return max(1, min(len(os.sched_getaffinity(0)), int(cores / max(1, ranks))))


def quota(process: int) -> float:
    """Cores that the control group of a process may use, by the narrowest limit on the way to its root; infinite without one."""
    library = ctypes.CDLL(str(Path(__file__).parent.parent / "libcollective_core.so"))
    library.cc_core_quota.argtypes, library.cc_core_quota.restype = [ctypes.c_int64, ctypes.c_char_p], ctypes.c_double
    found: float = library.cc_core_quota(process, b"")
    return found


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
