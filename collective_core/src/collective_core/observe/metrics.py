"""Counters of this process's collectives and of what they have waited for, which only grow: :func:`metrics`.

They begin with the process, and go on when it leaves a job and joins another one, as ranks of an elastic job do.
"""

from __future__ import annotations

from typing import TypedDict

from collective_core import _native
from collective_core.errors import NotInitialisedError
from collective_core.runtime import membership


class OperationMetrics(TypedDict):
    """The operations of one kind in one process set."""

    process_set: int
    kind: str  # allreduce, allgather, broadcast, barrier, alltoall, reducescatter or join
    operations: int  # that have ended, well or not
    failed: int  # of these
    bytes: int  # of this rank's tensors
    queue_seconds: float  # behind other operations of this rank
    peers_seconds: float  # until all ranks had come to the operation and had agreed on it; the data of small tensors comes along
    hosts_seconds: float  # of this: for other hosts. Known on the first rank of one of several hosts
    transfer_seconds: float  # in which data moved


class Metrics(TypedDict):
    """Result of :func:`metrics`."""

    rank: int | None  # None: outside a job
    size: int | None
    operations: list[OperationMetrics]
    waited_seconds: float  # in which the program's threads stood still for collectives
    late_seconds: dict[int, float]  # by rank of this host: peers_seconds of the operations to which it came last of this host
    slowest_rank: int | None  # that with most of them: known among the ranks of this host, and None where this rank waits for nobody
    arena_bytes: int  # of this rank's part of the arena: allocated now
    arena_peak_bytes: int  # at most since it has joined the job
    arena_size_bytes: int  # that could be; pages exist from the first touch
    elastic_resets: int  # how often this process has left its ranks for new ones


def metrics() -> Metrics:
    """This rank's numbers since its process began. Not collective, at any time, from any thread, with no effect on operations.

    Times are in seconds, sizes in bytes. Raises :class:`CollectiveError` (kind ``closed``) in a process that was forked from a rank.
    """
    try:
        me: membership.Membership | None = membership.current()  # once: another thread may leave the job meanwhile
    except NotInitialisedError:
        me = None
    use = _native.resources()
    late = {row.rank: row.peers_ns / 1e9 for row in _native.late_ranks()}
    return {
        "rank": me.rank if me else None,
        "size": len(me.peers) if me else None,
        "operations": [_of_kind(row) for row in _native.counters()],
        "waited_seconds": use.waited_ns / 1e9,
        "late_seconds": late,
        "slowest_rank": max(late, key=lambda rank: late[rank], default=None),
        "arena_bytes": use.arena_bytes,
        "arena_peak_bytes": use.arena_most,
        "arena_size_bytes": use.arena_all,
        "elastic_resets": membership.resets(),
    }


def _of_kind(row: _native.KindCounters) -> OperationMetrics:
    return {
        "process_set": row.process_set,
        "kind": _native.OPERATIONS[row.kind],
        "operations": row.operations,
        "failed": row.failed,
        "bytes": row.bytes,
        "queue_seconds": row.queue_ns / 1e9,
        "peers_seconds": row.peers_ns / 1e9,
        "hosts_seconds": row.hosts_ns / 1e9,
        "transfer_seconds": row.transfer_ns / 1e9,
    }
