"""How the ranks find each other: who is there, where, and the job's secret.

A launcher is one class with ``rank``, ``size`` and one collective, ``exchange``; everything else is the same for all. There
are two today: mpi4py under ``mpirun`` and a single process. Others (torchrun, Slurm) need no more than an ``exchange``.

Only bytes and JSON travel: nothing that a peer sends is unpickled.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
from typing import Any, Sequence

from collective_core import _native
from collective_core.config import Config
from collective_core.errors import CollectiveError
from collective_core.network import choose_address, interfaces_of

#: Set by the launchers of Open MPI, MPICH, Intel MPI and MVAPICH for every rank.
MPI_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "MV2_COMM_WORLD_SIZE")
SECRET_BYTES = 32


class Single:
    """One process on its own."""

    rank = 0
    size = 1

    def exchange(self, mine: bytes) -> list[bytes]:
        return [mine]

    def finish(self, healthy: bool) -> None:
        """Nothing to finish."""


def _communicator_of(ranks: list[int]) -> Any:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if world.Get_rank() not in ranks:
        raise CollectiveError(f"init(comm={ranks}) was called by rank {world.Get_rank()}, which is not in the list", "invalid")
    return world.Create_group(world.Get_group().Incl(ranks))


class Mpi:
    """The ranks of an MPI communicator. MPI is used here and nowhere else."""

    def __init__(self, communicator: Any | None = None) -> None:
        self._finalize = False
        if communicator is None:
            # MPI_Finalize waits for all ranks, so after a failure it would turn an error into a hang. We call it ourselves, and
            # only if all is well; unless the script has imported mpi4py.MPI first and so taken charge.
            ours = "mpi4py.MPI" not in sys.modules
            try:
                import mpi4py

                if ours:
                    mpi4py.rc.finalize = False
                from mpi4py import MPI
            except ImportError as error:
                raise CollectiveError(
                    f"this process was started by mpirun, but mpi4py cannot be used: {error}. "
                    "Install it next to the engine: pip install mpi4py"
                ) from error
            self._finalize = ours
            communicator = MPI.COMM_WORLD
        elif not hasattr(communicator, "Get_rank"):
            communicator = _communicator_of(list(communicator))
        self._communicator = communicator
        self.rank = int(communicator.Get_rank())
        self.size = int(communicator.Get_size())

    def exchange(self, mine: bytes) -> list[bytes]:
        """All ranks' bytes, by rank."""
        import numpy as np

        lengths = np.zeros(self.size, dtype=np.int64)
        self._communicator.Allgather(np.array([len(mine)], dtype=np.int64), lengths)
        longest = int(lengths.max())
        padded = np.frombuffer(mine.ljust(longest, b"\0"), dtype=np.uint8)
        everyone = np.zeros((self.size, longest), dtype=np.uint8)
        self._communicator.Allgather(padded, everyone)
        return [everyone[i, : int(lengths[i])].tobytes() for i in range(self.size)]

    def finish(self, healthy: bool) -> None:
        """Finalizes MPI at the end of a healthy process."""
        if not (self._finalize and healthy):
            return
        from mpi4py import MPI

        if MPI.Is_initialized() and not MPI.Is_finalized():
            MPI.Finalize()


def find_launcher(communicator: Any | None = None) -> Any:
    """The launcher that started this process. ``communicator``: of mpi4py, or a list of ranks of its COMM_WORLD."""
    if communicator is not None or any(name in os.environ for name in MPI_VARIABLES):
        return Mpi(communicator)
    return Single()


def host_identity(override: str | None = None) -> str:
    """A text that two processes share exactly when they can share memory through an abstract unix socket.

    Such sockets belong to a network namespace, so two containers of one machine count as two hosts unless they share it.
    """
    if override:
        return "override:" + override
    parts = [socket.gethostname()]
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            parts.append(file.read().strip())
        parts.append(str(os.stat("/proc/self/ns/net").st_ino))
    except OSError:
        parts.append("unknown")
    return "/".join(parts)


def meet(launcher: Any, config: Config, process_set: int = 0, members: Sequence[int] | None = None) -> list[_native.PeerInfo]:
    """Tells the ranks about each other and connects those of the process set. Returns the table of its peers, in order.

    Two rounds: who is on which host with which interfaces, from which each rank chooses an address and opens its listeners;
    then the addresses and the secret, which rank 0 draws afresh for every job.
    """
    identity = host_identity(config.host_id)
    mine: dict[str, Any] = {
        "host_id": identity,
        "host_name": socket.gethostname(),
        "pid": os.getpid(),
        "interfaces": _native.interfaces(),
    }
    everyone = exchange_documents(launcher, mine)
    ranks = list(range(launcher.size)) if members is None else members
    included = launcher.rank in ranks
    first_of_host: dict[str, dict[str, Any]] = {}
    for info in (everyone[rank] for rank in ranks):
        first_of_host.setdefault(info["host_id"], info)
    address = None
    error = ""
    port, socket_name = 0, ""
    try:
        if included and len(first_of_host) > 1:
            others = [interfaces_of(info["interfaces"]) for host, info in first_of_host.items() if host != identity]
            address = choose_address(interfaces_of(mine["interfaces"]), others, config.address, config.networks)
        if included:
            port, socket_name = _native.open_listeners(address)
    except CollectiveError as failure:
        error = str(failure)

    secret = secrets.token_bytes(SECRET_BYTES).hex() if launcher.rank == 0 else ""
    places = exchange_documents(launcher, {"address": address or "", "port": port, "socket": socket_name, "secret": secret, "error": error})
    _raise_first_error(places, everyone)
    peers = [
        _native.PeerInfo(rank, info["pid"], info["host_id"], info["host_name"], place["address"], place["port"], place["socket"])
        for rank, info, place in ((rank, everyone[rank], places[rank]) for rank in ranks)
    ]
    if included:
        secret_bytes = bytes.fromhex(places[0]["secret"])
        _native.connect(ranks.index(launcher.rank), peers, secret_bytes, config.timeout, config.start_timeout, process_set)
    return peers


def exchange_documents(launcher: Any, mine: dict[str, Any]) -> list[dict[str, Any]]:
    """All ranks' JSON documents, by rank."""
    return [json.loads(text.decode()) for text in launcher.exchange(json.dumps(mine).encode())]


def _raise_first_error(places: list[dict[str, Any]], everyone: list[dict[str, Any]]) -> None:
    """A rank that cannot start says so to all: nobody waits for it in vain."""
    failed = [(rank, place["error"]) for rank, place in enumerate(places) if place["error"]]
    if failed:
        rank, text = failed[0]
        who = f"rank {rank} (host {everyone[rank]['host_name']}, pid {everyone[rank]['pid']})"
        raise CollectiveError(f"{who} cannot start: {text}", "invalid", [number for number, _ in failed])
