"""The members of a group of torch.distributed meet through the store that it gives them."""

from __future__ import annotations

import atexit
import json
import os
import sys
from datetime import timedelta
from typing import Any, Iterator

import torch.distributed as dist

from collective_core import _native, job
from collective_core.errors import CollectiveError
from collective_core.runtime import config, launchers, membership, network, rendezvous, torch_variables
from collective_core.runtime.store import START_HINT


class StoreLauncher:
    """Launcher, as rendezvous.py asks for one, over a store of PyTorch's. ``timeout``: seconds for everyone to come.

    Whoever can reach the store can read what the members tell each other there, as with every backend. What keeps strangers out is the
    job's secret (COLLECTIVE_SECRET_FILE), which our launchers bring to all ranks, and which never travels.
    """

    hears_of_deaths = False

    def __init__(self, store: Any, rank: int, size: int, timeout: float) -> None:
        self.rank, self.size = rank, size
        self.secret = launchers.read_secret(os.environ)
        self._store, self._timeout = store, timeout
        # One store may serve several groups of one name, one after the other: after destroy_process_group, under torchrun.
        self._prefix = f"collective.{int(store.add(f'collective.joined.{rank}', 1))}"
        self._exchanges = 0

    def exchange(self, mine: bytes) -> list[bytes]:
        """All members' bytes, by rank. Raises :class:`CollectiveError` (kind ``timeout``) naming those that did not come.

        Rank 0 collects them, so that the store is asked a few times for each member, not once for each pair.
        """
        self._exchanges += 1
        prefix, limit = f"{self._prefix}.{self._exchanges}", timedelta(seconds=self._timeout)
        keys = [f"{prefix}.{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], mine)
        try:
            if self.rank == 0:
                self._store.wait(keys, limit)
                everyone = [self._store.get(key) for key in keys]
                self._store.set(f"{prefix}.all", json.dumps([each.hex() for each in everyone]))
                return everyone
            self._store.wait([f"{prefix}.all"], limit)
            return [bytes.fromhex(each) for each in json.loads(self._store.get(f"{prefix}.all"))]
        except RuntimeError as error:  # the store's, of whatever kind
            missing = [rank for rank, key in enumerate(keys) if not self._has(key)] or [0]
            text = f"ranks {missing} of the group did not come within {self._timeout:g} s (COLLECTIVE_START_TIMEOUT): {_first_line(error)}"
            raise CollectiveError(text + START_HINT, "timeout", missing) from error

    def _has(self, key: str) -> bool:
        try:
            return bool(self._store.check([key]))
        except RuntimeError:  # the store is gone, with rank 0
            return False

    def finish(self, patience: float) -> None:
        """Nothing to finish: the store is the program's."""


def meet_with_launcher(timeout: timedelta = dist.default_pg_timeout, **_: Any) -> Iterator[Any] | None:
    """A store of PyTorch's for the ranks that their launcher has started, this one's number, and theirs; None where there is no launcher.

    Rank 0 holds it, at the address at which the other hosts reach it. Sets LOCAL_RANK and LOCAL_WORLD_SIZE, by which programs choose their
    GPU, where the launcher has not. Raises ValueError, as PyTorch does where it is told of no ranks.
    """
    try:
        if launchers.is_elastic() and launchers.generation == 0:
            text = "the ranks of an elastic job come and go: call it where this one has its rank, in the function of hvd.elastic.run"
            raise CollectiveError(text, "invalid")
        told = launchers.read(os.environ)
        if not any(name in os.environ for name in launchers.MPI_VARIABLES) and (told is None or told.size == 1):
            return None
        settings = config.from_environment()
        launcher = launchers.find_launcher(None, settings)
        store = _store_of(launcher, settings, timeout)
    except CollectiveError as error:
        raise ValueError(f"Error initializing torch.distributed using env:// rendezvous: {error}") from error
    if isinstance(launcher, launchers.Mpi):
        atexit.register(_finish, launcher, os.getpid())
    else:
        launcher.finish(0.0)
    return iter([(store, launcher.rank, launcher.size)])


def _store_of(launcher: Any, settings: config.Config, timeout: timedelta) -> Any:
    identity = rendezvous.host_identity(settings.host_id)
    everyone = rendezvous.exchange_first(
        launcher, "torch.distributed.init_process_group", {"host_id": identity, "interfaces": _native.interfaces()}
    )
    of_rank = torch_variables.rank_variables(launcher.rank, [each["host_id"] for each in everyone], ("", 0))
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.setdefault(name, of_rank[name])
    others = [network.interfaces_of(each["interfaces"]) for each in everyone if each["host_id"] != identity]
    mine: dict[str, Any] = {}
    if launcher.rank == 0:
        own = network.interfaces_of(everyone[0]["interfaces"])
        address = network.choose_address(own, others, settings.address, settings.networks) if others else "127.0.0.1"
        store = dist.TCPStore(address, 0, launcher.size, is_master=True, timeout=timeout, wait_for_workers=False)
        mine = {"address": address, "port": store.port}
    meeting = rendezvous.exchange_documents(launcher, mine)[0]
    if launcher.rank == 0:
        return store
    return dist.TCPStore(meeting["address"], meeting["port"], launcher.size, is_master=False, timeout=timeout)


def _finish(launcher: Any, pid: int) -> None:
    """At the end of the process, which mpirun takes for a failure where MPI was not finalized; not of one that was forked from it."""
    if pid == os.getpid():
        launcher.finish(0.0 if hasattr(sys, "last_value") or not membership.is_healthy() else job.EXIT_PATIENCE)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
