"""Sets of ranks that run collectives of their own, at the same time as other sets do.

A process set has its own connections and its own part of shared memory, so operations of different sets never wait for each
other. Making and removing one is collective over *all* ranks of the job. An operation's root is given as its rank in the job.
"""

from __future__ import annotations

from typing import Any, Callable, Iterable, Sequence

import numpy as np

from collective_core import _native
from collective_core.errors import InvalidUseError
from collective_core.runtime import external, membership, operations, rendezvous


class ProcessSet:
    """Ranks of the job, or an mpi4py communicator of them. To be given to :func:`add_process_set` or ``init``.

    ``process_set_id`` is None before the set was added and after it was removed, and so are the ``ranks`` of a communicator.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any | None = None

    def __init__(self, ranks_or_comm: Any) -> None:
        if hasattr(ranks_or_comm, "Get_rank"):
            self.mpi_comm = ranks_or_comm
            return
        ranks = list(ranks_or_comm) if isinstance(ranks_or_comm, Iterable) else None
        if ranks is None or any(not isinstance(rank, int) or isinstance(rank, bool) for rank in ranks):
            raise ValueError("ProcessSet should be initialized with a list of process ranks or an mpi4py Comm object")
        self.ranks = sorted(ranks)

    def _members(self) -> list[int]:
        if self.process_set_id not in _registered or self.ranks is None or not membership.is_initialized():
            raise InvalidUseError(f"{self} is not registered: call add_process_set() first", "invalid")
        return self.ranks

    def included(self) -> bool | None:
        """Whether this process belongs to the set; None if the set is not registered."""
        return None if self.process_set_id is None else membership.rank() in self._members()

    def size(self) -> int | None:
        """Ranks in the set; None if the set is not registered."""
        return None if self.process_set_id is None else len(self._members())

    def rank(self) -> int | None:
        """This process's number in the set; None if the set is not registered or this process is not in it."""
        return self._members().index(membership.rank()) if self.included() else None

    def invalidate(self) -> None:
        """The set is no longer registered; it can be added again."""
        self.process_set_id = None
        if self.mpi_comm is not None:
            self.ranks = None  # which are learnt from it

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


#: All ranks of the job. Its ``ranks`` are known after ``init``.
global_process_set = ProcessSet([])
global_process_set.process_set_id = 0

#: Called with a process set's number before this process leaves it.
on_leaving: list[Callable[[int], None]] = []

_registered: dict[int, ProcessSet] = {}
_made = 0


class Members:
    """A process set as an operation of this rank sees it."""

    __slots__ = ("id", "rank", "ranks", "size")

    def __init__(self, number: int, ranks: list[int], rank: int) -> None:
        self.id = number
        self.ranks = ranks
        self.rank = rank
        self.size = len(ranks)

    def number_of(self, rank: int) -> int:
        """The number in the set of a rank of the job, -1 if it is not in the set."""
        return self.ranks.index(rank) if rank in self.ranks else -1


_everyone = Members(0, [], -1)
_reserved = ""


def reserve(reason: str) -> None:
    """From now on operations of all ranks are refused for this reason; until it is called with none."""
    global _reserved
    _reserved = reason
    membership.note_process_sets()


def is_reserved() -> bool:
    """Whether operations of all ranks are refused."""
    return bool(_reserved)


def _refuse_reserved() -> None:
    if _reserved:
        raise InvalidUseError(_reserved, "invalid")


def members_of(process_set: ProcessSet | None) -> Members:
    """Raises :class:`CollectiveError` (kind ``invalid``) if this process is not in the set, or ``closed`` before ``init``."""
    me = membership.rank()
    if process_set is None or process_set.process_set_id == 0:
        _refuse_reserved()
        return _everyone
    ranks = process_set._members()
    if me not in ranks:
        raise InvalidUseError(f"rank {me} is not in process set {process_set.process_set_id} of ranks {ranks}", "invalid")
    return Members(process_set.process_set_id or 0, ranks, ranks.index(me))


def begin(sets: Sequence[ProcessSet], comm: Any | None) -> None:
    """At ``init``: the global set, and the sets and the communicator that ``init`` was given. Raises what :func:`add_process_set` does."""
    global _everyone, _made
    _registered.clear()
    _made = 0
    everyone = list(range(membership.size()))
    global_process_set.ranks = everyone
    global_process_set.mpi_comm = comm if hasattr(comm, "Get_rank") else None
    _registered[0] = global_process_set
    _everyone = Members(0, everyone, membership.rank())
    for process_set in sets:
        add_process_set(process_set)


def end() -> None:
    """At ``shutdown``: sets that were added are gone."""
    for number, process_set in _registered.items():
        _leave(number)
        if number:
            process_set.invalidate()
    _registered.clear()
    global_process_set.ranks, global_process_set.mpi_comm = [], None


def _leave(number: int) -> None:
    for told in on_leaving:
        told(number)


class EngineLauncher:
    """The ranks of the job, who meet again through the engine itself (as rendezvous.py asks of a launcher)."""

    hears_of_deaths = False  # it does, but a set that cannot connect must not end the job's own engine

    def __init__(self) -> None:
        self.rank = membership.rank()
        self.size = membership.size()
        self.secret = membership.job_secret()

    def exchange(self, mine: bytes) -> list[bytes]:
        own = np.frombuffer(mine, dtype=np.uint8)
        name = membership.next_name("process_set.documents")
        allgather = _native.operation(_native.ALLGATHER, name, "uint8", own.shape, own.size, own.ctypes.data)
        everyone, lengths = operations.gather(allgather, own, self.size)
        ends = np.cumsum(lengths)
        return [everyone[end - length : end].tobytes() for end, length in zip(ends, lengths)]


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Makes a set usable; returns it. All ranks of the job call this with the same ranks, members or not.

    Of communicators, which MPI's Split makes several of at once, every rank passes its own: each becomes a set.

    Raises ValueError, on all ranks, for ranks that do not exist, occur twice or differ between ranks, and for a set that is
    registered already.
    """
    global _made
    _refuse_reserved()
    chosen = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if chosen.mpi_comm is not None and chosen.ranks is None:
        return _add_communicators(chosen)
    ranks = chosen.ranks
    launcher = EngineLauncher()
    asked = rendezvous.exchange_documents(launcher, {"ranks": ranks})
    different = [rank for rank, other in enumerate(asked) if other["ranks"] != asked[0]["ranks"]]
    if different:
        wishes = "; ".join(f"rank {rank}: {other['ranks']}" for rank, other in enumerate(asked))
        raise ValueError(f"add_process_set must be called with the same ranks everywhere. {wishes}")
    if not ranks or len(set(ranks)) < len(ranks) or not 0 <= ranks[0] <= ranks[-1] < launcher.size:
        raise ValueError(f"a process set needs different ranks from 0 to {launcher.size - 1}, not {ranks}")
    if any(known.ranks == ranks for known in _registered.values()):
        raise ValueError(f"A process set with the ranks {ranks} exists already")
    _made += 1
    rendezvous.meet(launcher, membership.current().config, _made, ranks)
    chosen.process_set_id = _made
    _registered[_made] = chosen
    membership.note_process_sets()
    return chosen


def _add_communicators(mine: ProcessSet) -> ProcessSet:
    # MPI gives a null communicator, which is false, to ranks that are in none.
    mine.ranks = sorted(mine.mpi_comm.allgather(membership.rank())) if mine.mpi_comm else []
    asked = rendezvous.exchange_documents(EngineLauncher(), {"ranks": mine.ranks})
    different = sorted({tuple(other["ranks"]) for other in asked if other["ranks"]})
    for ranks in different:
        add_process_set(mine if list(ranks) == mine.ranks else ProcessSet(ranks))
    return mine


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a set that :func:`add_process_set` made; all ranks of the job call it. False for the global set and unknown ones."""
    number = process_set.process_set_id
    if not number or number not in _registered:
        return False
    _refuse_reserved()
    operations.run(_native.operation(_native.BARRIER, f"remove_process_set.{number}", "uint8", (), 0))
    if process_set.included():
        _leave(number)
        _native.close(number)
        external.leave(number)
    _registered.pop(number).invalidate()
    process_set.invalidate()
    membership.note_process_sets()
    return True


def process_set_by_id(number: int) -> ProcessSet:
    """The registered set with this id. Raises ValueError if there is none."""
    if number not in _registered:
        raise ValueError(f"there is no process set with id {number}")
    return _registered[number]


def are_several() -> bool:
    """Whether more than one set is registered: the same on all ranks, which add and remove them together."""
    return len(_registered) > 1


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """The ranks of every registered set."""
    return {number: list(known.ranks or []) for number, known in _registered.items()}
