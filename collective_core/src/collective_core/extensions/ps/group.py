"""The job's servers and workers: the last ranks are servers (``--servers N``), and messages between two ranks go between both."""

from __future__ import annotations

import sys
from typing import Any, Callable, Protocol

from collective_core.common.elastic_states import HostsUpdatedInterrupt
from collective_core.errors import CollectiveError
from collective_core.runtime import membership, process_sets, rendezvous
from collective_core.runtime.point_to_point import PointToPoint
from collective_core.runtime.process_sets import EngineLauncher, ProcessSet

#: Tags of messages: of workers to servers, of servers to workers, and of a server's state to whoever is that server now.
REQUEST, REPLY, STATE = 1, 2, 3
#: Seconds by which a worker waits longer for an answer than a server has time for it: the server knows for whom it waits.
MARGIN = 5.0
_RESERVED = (
    "some ranks of this job are parameter servers, which take part in no collectives while they serve: "
    "give the operation process_set=hvd.ps.workers()"
)


class Shard(Protocol):
    """State of a server. It outlives the ranks of an elastic job."""

    index: int
    updates: int

    def pack(self) -> Any:
        """All of it as a message."""


#: By server, what this process holds as the one that it is, or was before the ranks changed, and as the backup of another.
kept: dict[int, Shard] = {}


class Group:
    """Group as one rank sees it, for the time from the first use of servers to :func:`leave`."""

    def __init__(self, found: int, replicate: bool) -> None:
        """Collective over all ranks. ``found``: updates in the state that this rank could take over as a server; -1: there is none."""
        member = membership.current()
        self.rank, self.servers = member.rank, _servers()
        self.workers = member.size - self.servers
        self.index = self.rank - self.workers  # among the servers; negative for a worker
        self.timeout = member.config.timeout
        launcher = EngineLauncher()
        mine = {"kept": [[index, shard.updates] for index, shard in kept.items()], "found": found, "replicate": replicate}
        told = rendezvous.exchange_documents(launcher, mine)
        wishes = [each["replicate"] for each in told[self.workers :]]
        if len(set(wishes)) > 1:
            text = f"some servers serve with replicate=True and others without: {wishes} by server"
            raise CollectiveError(text, "mismatch", [self.workers + wishes.index(True)])
        self.stall_warning = member.config.stall_warning
        self.messages = PointToPoint(launcher, member.peers, 0, self.timeout + MARGIN)  # the server warns, which knows of whom
        self.process_set = _set_of(list(range(self.workers)))
        #: The rank from whose memory each server's state comes; its own where the state is there, or is not to come from a rank.
        self.source = [_newest(told, index, self.workers + index) for index in range(self.servers)]
        process_sets.reserve(_RESERVED)

    def name(self, rank: int) -> str:
        return self.messages.describe(rank)

    def rank_of(self, server: int) -> int:
        return self.workers + server

    def hand_over(self) -> None:
        """Sends what this process holds to the ranks that are those servers now."""
        for index in [index for index in kept if index != self.index]:
            shard = kept.pop(index)
            if self.source[index] == self.rank:
                self.messages.send(shard.pack(), self.rank_of(index), STATE)


def _newest(told: list[dict[str, Any]], index: int, own: int) -> int:
    updates = {rank: dict(each["kept"]).get(index, -1) for rank, each in enumerate(told)}
    holders = [rank for rank, count in updates.items() if count > told[own]["found"]]
    return max(holders, key=lambda rank: (updates[rank], rank == own), default=own)


def _servers() -> int:
    count = membership.current().config.servers
    if count == 0:
        raise CollectiveError("this job has no parameter servers: start it with --servers N (or set COLLECTIVE_SERVERS=N)", "invalid")
    return count


def _set_of(ranks: list[int]) -> ProcessSet:
    return _known_set_of(ranks) or process_sets.add_process_set(ranks)


def _known_set_of(ranks: list[int]) -> ProcessSet | None:
    known = [number for number, members in process_sets.get_process_set_ids_and_ranks().items() if members == ranks]
    return process_sets.process_set_by_id(known[0]) if known else None


def known_workers() -> ProcessSet | None:
    """The process set of all workers, if this process has been in a group since ``init()``, also when it has left it."""
    return _known_set_of(list(range(membership.size() - membership.current().config.servers)))


def is_server() -> bool:
    """Whether this rank is one of the last N, which are servers (``--servers N``). False in a job without servers."""
    member = membership.current()
    return member.rank >= member.size - member.config.servers


_group: Group | None = None
#: Called when this process leaves the group; whether in good order.
on_leaving: list[Callable[[bool], None]] = []


def current() -> Group | None:
    return _group


def join(found: int = -1, replicate: bool = False) -> Group:
    """The group of this job's ranks; the first call is collective over all of them. Raises :class:`CollectiveError` without servers."""
    global _group
    if _group is None:
        _servers()
        _group = Group(found, replicate)
        _group.hand_over()
    return _group


def leave(in_order: bool = True) -> None:
    """Ends the exchange with the others; collectives of all ranks are possible again."""
    global _group
    if _group is None:
        return
    try:
        for told in on_leaving:
            told(in_order)
    finally:
        left, _group = _group, None
        left.messages.end()
        process_sets.reserve("")


def leave_at_end(in_order: bool) -> None:
    """The same where nobody could catch an error, and more is to be ended: it is printed."""
    try:
        leave(in_order)
    except (CollectiveError, HostsUpdatedInterrupt) as error:
        print(f"collective_core: not all updates may have reached the parameter servers: {error}", file=sys.stderr, flush=True)


membership.before_leaving.append(leave_at_end)
