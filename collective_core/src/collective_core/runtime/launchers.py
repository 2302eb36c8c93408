"""Launchers: which one started this process, from the variables that it sets, and how its ranks meet.

A launcher has ``rank``, ``size``, the job's ``secret`` (which may be empty), one collective, ``exchange``, and ``finish``, which
is told for how many seconds it may wait for the other ranks. In this order:

1. ``init(comm=…)``: mpi4py;
2. TORCHELASTIC_RUN_ID: ``torchrun``, which may itself have been started by any other, so it comes first;
3. COLLECTIVE_RANK, COLLECTIVE_SIZE, COLLECTIVE_STORE (host:port of rank 0, or local:NAME in one host): any launcher;
4. the variables of ``mpirun`` (Open MPI, MPICH, Intel MPI, MVAPICH, or ``srun --mpi``): mpi4py, if it can be imported;
5. RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT: as set by hand or by ``torchrun``;
6. SLURM_PROCID, SLURM_STEP_NUM_TASKS: ``srun``;
7. none of them: a job of one process.

Without MPI the ranks meet at rank 0 (store.py). On one host they need nothing more. On several they need a secret that all of
them know: in COLLECTIVE_SECRET or, better, in the file that COLLECTIVE_SECRET_FILE names.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from typing import Any, Mapping, NamedTuple

import numpy as np

from collective_core.errors import CollectiveError
from collective_core.runtime import store
from collective_core.runtime.config import DEFAULT_START_TIMEOUT, Config

#: Set by the launchers of Open MPI, MPICH, Intel MPI and MVAPICH for every rank.
MPI_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "MV2_COMM_WORLD_SIZE")
#: Set by torchrun for its ranks, and by nothing else.
RUN_OF_TORCHRUN = "TORCHELASTIC_RUN_ID"
#: host:port of the rendezvous server of an elastic job; set by its driver.
ELASTIC_SERVER = "COLLECTIVE_ELASTIC"
#: Shorter ones can be guessed.
MIN_SECRET = 16
#: Ports for jobs of Slurm, by their number: below those that systems give to outgoing connections.
FIRST_SLURM_PORT, SLURM_PORTS = 15000, 15000
#: Seconds between looks whether all ranks have told what they had to tell.
EXCHANGE_INTERVAL = 0.0005
#: Seconds between looks whether all ranks have come to their end.
FINISH_INTERVAL = 0.005

#: The number of the ranks' generation to which this worker of an elastic job belongs, from 1; 0 where it has no rank.
generation = 0


def is_elastic() -> bool:
    """Whether this process belongs to an elastic job, and not to a torchrun that a worker of one has started."""
    return ELASTIC_SERVER in os.environ and RUN_OF_TORCHRUN not in os.environ


class NoMpiError(CollectiveError):
    """mpi4py cannot be imported."""


class Single:
    """One process on its own."""

    rank = 0
    size = 1
    secret = b""
    hears_of_deaths = False

    def exchange(self, mine: bytes) -> list[bytes]:
        return [mine]

    def finish(self, patience: float) -> None:
        """Nothing to finish."""


def _open_mpi() -> tuple[Any, bool]:
    """mpi4py's MPI, initialised, and whether that was our doing: then it is for us to finalize it."""
    # MPI_Finalize waits for all ranks, so after a failure it would turn an error into a hang. We call it ourselves, and only where
    # they can come; unless the script has initialised MPI first and so taken charge.
    first = "mpi4py.MPI" not in sys.modules
    try:
        import mpi4py

        if first:
            mpi4py.rc.finalize = False
        from mpi4py import MPI
    except ImportError as error:
        raise NoMpiError(
            f"this process was started by mpirun, but mpi4py cannot be used: {error}. Install it next to the engine: pip install mpi4py"
        ) from error
    if MPI.Is_finalized():
        raise CollectiveError("MPI has been finalized already: call init() before MPI.Finalize()", "closed")
    if MPI.Is_initialized():
        return MPI, first
    MPI.Init_thread(MPI.THREAD_MULTIPLE)  # the script has told mpi4py to leave that to others, as scripts for Horovod do
    return MPI, True


def _communicator_of(ranks: list[int], world: Any) -> Any:
    if world.Get_rank() not in ranks:
        raise CollectiveError(f"init(comm={ranks}) was called by rank {world.Get_rank()}, which is not in the list", "invalid")
    return world.Create_group(world.Get_group().Incl(ranks))


class Mpi:
    """The ranks of an MPI communicator. MPI is used here and, with COLLECTIVE_BACKEND=mpi, in extensions/mpi.py."""

    hears_of_deaths = False  # its collectives wait for ever for a rank that does not come

    def __init__(self, communicator: Any | None = None) -> None:
        self._finalize = False
        if communicator is None or not hasattr(communicator, "Get_rank"):
            mpi, self._finalize = _open_mpi()
            communicator = mpi.COMM_WORLD if communicator is None else _communicator_of(list(communicator), mpi.COMM_WORLD)
        self.communicator = communicator
        self.secret = read_secret(os.environ)
        self.rank = int(communicator.Get_rank())
        self.size = int(communicator.Get_size())

    def exchange(self, mine: bytes) -> list[bytes]:
        """All ranks' bytes, by rank."""
        lengths = np.zeros(self.size, dtype=np.int64)
        self._complete(self.communicator.Iallgather(np.array([len(mine)], dtype=np.int64), lengths))
        longest = int(lengths.max())
        padded = np.frombuffer(mine.ljust(longest, b"\0"), dtype=np.uint8)
        everyone = np.zeros((self.size, longest), dtype=np.uint8)
        self._complete(self.communicator.Iallgather(padded, everyone))
        return [everyone[i, : int(lengths[i])].tobytes() for i in range(self.size)]

    @staticmethod
    def _complete(request: Any) -> None:
        """As MPI's own wait, but Ctrl-C works meanwhile."""
        while not request.Test():
            time.sleep(EXCHANGE_INTERVAL)

    def finish(self, patience: float) -> None:
        """Finalizes MPI at the end of the process, if all ranks come to theirs within so many seconds.

        mpirun's own exit status is 1 where a rank ends without. When a rank has failed, mpirun ends those that wait here by SIGTERM: they
        end with their own exit codes then, which tell a rank that has left too early from those that were still at work.
        """
        if not self._finalize or patience <= 0:
            return
        from mpi4py import MPI

        if not MPI.Is_initialized() or MPI.Is_finalized():
            return
        told_to_end: list[int] = []
        catches = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if catches:
            signal.signal(signal.SIGTERM, lambda number, _: told_to_end.append(number))
        end, everyone = time.monotonic() + patience, MPI.COMM_WORLD.Ibarrier()
        while not (arrived := everyone.Test()) and not told_to_end and time.monotonic() < end:
            time.sleep(FINISH_INTERVAL)
        if catches and not told_to_end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if arrived:
            MPI.Finalize()


class LauncherInfo(NamedTuple):
    """Facts that a launcher's variables say."""

    launcher: str
    rank: int
    size: int
    one_host: bool
    job: str  # names the local meeting point: two jobs of one user at the same time have different ones
    where: tuple[str, int]  # rank 0, for ranks of other hosts


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise CollectiveError(f"{name}={environment[name]!r} is not a number", "invalid") from None


def first_host(node_list: str) -> str:
    """The first host of Slurm's short form: ``node[03-05,9],other`` begins with node03."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\])?([^,\[]*)", node_list)
    if not match:
        raise CollectiveError(f"the list of nodes {node_list!r} cannot be read", "invalid")
    return match.group(1) + (match.group(2) or "") + match.group(3)


def read(environment: Mapping[str, str]) -> LauncherInfo | None:
    """What the variables of launchers other than MPI's say; None if there is none. Pure."""
    port = _number(environment, "COLLECTIVE_PORT") if environment.get("COLLECTIVE_PORT") else 0
    if "COLLECTIVE_RANK" in environment and RUN_OF_TORCHRUN not in environment:
        needed = ("COLLECTIVE_SIZE", "COLLECTIVE_STORE")
        missing = [name for name in needed if name not in environment]
        if missing:
            raise CollectiveError(f"COLLECTIVE_RANK is set, but not {' and '.join(missing)}", "invalid")
        rank, size = _number(environment, "COLLECTIVE_RANK"), _number(environment, "COLLECTIVE_SIZE")
        host, _, number = environment["COLLECTIVE_STORE"].rpartition(":")
        if host == "local":
            return LauncherInfo("COLLECTIVE_RANK", rank, size, True, number, ("localhost", 0))
        if not host or not number.isdecimal():
            raise CollectiveError(f"COLLECTIVE_STORE={environment['COLLECTIVE_STORE']!r} is not host:port or local:NAME", "invalid")
        return LauncherInfo("COLLECTIVE_RANK", rank, size, False, "", (host.strip("[]"), int(number)))
    if all(name in environment for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        size, master = _number(environment, "WORLD_SIZE"), _number(environment, "MASTER_PORT")
        one_host = environment.get("LOCAL_WORLD_SIZE") == str(size)
        job = f"torchrun-{environment.get(RUN_OF_TORCHRUN, '')}-{master}-{environment.get('TORCHELASTIC_RESTART_COUNT', 0)}"
        # The port itself is torchrun's own.
        return LauncherInfo("torchrun", _number(environment, "RANK"), size, one_host, job, (environment["MASTER_ADDR"], port or master + 1))
    if all(name in environment for name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_JOB_ID")):
        size, job_number = _number(environment, "SLURM_STEP_NUM_TASKS"), _number(environment, "SLURM_JOB_ID")
        step = environment.get("SLURM_STEP_ID", "0")
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "localhost")
        one_host = environment.get("SLURM_STEP_NUM_NODES", environment.get("SLURM_NNODES")) == "1"
        chosen = port or FIRST_SLURM_PORT + job_number % SLURM_PORTS
        return LauncherInfo(
            "srun", _number(environment, "SLURM_PROCID"), size, one_host, f"slurm-{job_number}-{step}", (first_host(nodes), chosen)
        )
    return None


def read_secret(environment: Mapping[str, str]) -> bytes:
    """The job's secret; empty if there is none. Raises :class:`CollectiveError` for a file that others can read."""
    path = environment.get("COLLECTIVE_SECRET_FILE")
    secret = environment.get("COLLECTIVE_SECRET", "").encode()
    if path:
        try:
            with open(path, "rb") as file:
                if os.fstat(file.fileno()).st_mode & 0o077:
                    raise CollectiveError(f"COLLECTIVE_SECRET_FILE={path} can be read by other users: chmod 600 {path}", "invalid")
                secret = file.read().strip()
        except OSError as error:
            raise CollectiveError(f"COLLECTIVE_SECRET_FILE={path} cannot be read: {error.strerror}", "invalid") from error
    if secret and len(secret) < MIN_SECRET:
        raise CollectiveError(f"the job's secret is shorter than {MIN_SECRET} characters", "invalid")
    return secret


def meet_at_store(told: LauncherInfo, environment: Mapping[str, str], timeout: float) -> Any:
    """The ranks of a launcher without MPI."""
    if not 0 <= told.rank < told.size:
        raise CollectiveError(f"{told.launcher} says that this is rank {told.rank} of {told.size}", "invalid")
    if told.size == 1:
        return Single()
    secret = read_secret(environment)
    if told.one_host:
        endpoint = store.Endpoint(f"collective_core-{os.getuid()}-{told.job}")
        return store.enter(told.rank, told.size, endpoint, secret or b"one user of one host", timeout)
    if not secret:
        raise CollectiveError(
            f"this job was started by {told.launcher} on several hosts and needs a secret that all ranks know: set "
            "COLLECTIVE_SECRET_FILE to a file with the same random text on every host "
            "(head -c 32 /dev/urandom | base64 > secret; chmod 600 secret)",
            "invalid",
        )
    return store.enter(told.rank, told.size, store.Endpoint(told.where), secret, timeout)


def find_launcher(communicator: Any | None = None, config: Config | None = None) -> Any:
    """The launcher that started this process. ``communicator``: of mpi4py, or a list of ranks of its COMM_WORLD."""
    told = read(os.environ) if communicator is None else None
    is_innermost = told is not None and (told.launcher == "COLLECTIVE_RANK" or RUN_OF_TORCHRUN in os.environ)
    if communicator is not None or (any(name in os.environ for name in MPI_VARIABLES) and not is_innermost):
        try:
            return Mpi(communicator)
        except NoMpiError:
            if told is None:
                raise
    if told is None:
        return Single()
    return meet_at_store(told, os.environ, config.start_timeout if config else DEFAULT_START_TIMEOUT)
