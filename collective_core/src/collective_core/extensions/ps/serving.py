"""A rank that is a parameter server."""

from __future__ import annotations

import os
from pathlib import Path

from collective_core.errors import CollectiveError
from collective_core.extensions.ps import group
from collective_core.extensions.ps.group import Group, is_server
from collective_core.extensions.ps.server import Server
from collective_core.extensions.ps.store import Store, updates_in
from collective_core.runtime import membership

DEFAULT_SNAPSHOT_EVERY = 100


def serve(snapshots: str | os.PathLike[str] | None = None, snapshot_every: int = DEFAULT_SNAPSHOT_EVERY, replicate: bool = False) -> None:
    """Serves as one of the job's parameter servers until all workers have ended or called ``close()``. Prints nothing.

    Args:
        snapshots: a folder that all hosts share. Each server writes what it holds to a file there, in the format of safetensors, and takes
            it from there when it begins: after a server died in an elastic job, and in a job that is started again. Every training has a
            folder of its own.
        snapshot_every: updates after which a snapshot is written, before anybody is answered: a server that dies loses at most so many.
            An update is a worker's step, with ``staleness=0`` one of all workers.
        replicate: each server has a copy of what it holds on the next one, which makes every update before anybody is answered: a server
            that dies in an elastic job loses none that a worker has seen. Takes twice the memory and the work; needs two servers.

    Raises :class:`CollectiveError` naming the rank and its host where a worker or a server is lost, and kind ``invalid`` on a rank that is
    no server, for ``snapshot_every`` below 1, a folder that cannot be used, and ``replicate`` with one server.
    """
    if not is_server():
        raise CollectiveError("this rank is a worker: only the last ranks of a job serve (--servers N; hvd.ps.is_server())", "invalid")
    if snapshot_every < 1:
        raise CollectiveError(f"snapshot_every={snapshot_every} is not possible: write a number of updates from 1", "invalid")
    folder = None if snapshots is None else Path(snapshots)
    member = membership.current()
    servers = member.config.servers
    index = member.rank - (member.size - servers)
    found = -1
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            found = updates_in(folder, index, servers)
        except (OSError, ValueError) as error:
            raise CollectiveError(f"snapshots={folder}: {error}", "invalid") from error
    if replicate and servers == 1:
        raise CollectiveError("replicate=True needs another server, which has the copy: --servers 2 or more", "invalid")
    joined = group.join(found, replicate)
    store = _take_over(joined, folder, found)
    group.kept[joined.index] = store
    written = store.updates

    def snapshot() -> None:
        nonlocal written
        if folder is not None and store.updates >= written + snapshot_every:
            store.write(folder)
            written = store.updates

    Server(joined, store, snapshot, Store.unpack if replicate else None).run()
    if folder is not None:
        store.write(folder)
    group.kept.clear()
    group.leave()


def _take_over(joined: Group, folder: Path | None, found: int) -> Store:
    """The newest of what this process holds, what another rank does, and the snapshot; an empty one where there is none."""
    source = joined.source[joined.index]
    if source != joined.rank:
        transfer = joined.messages.receive(None, source, group.STATE)
        while not transfer.wait(1.0):
            pass
        return Store.unpack(transfer.memory)
    held = group.kept.get(joined.index)
    if isinstance(held, Store) and held.updates >= found:
        return held
    if folder is not None and found >= 0:
        try:
            return Store.read_snapshot(folder, joined.index)
        except (OSError, ValueError) as error:
            raise CollectiveError(f"snapshots={folder}: {error}", "invalid") from error
    return Store(joined.index, joined.servers)
