"""One copy of a file's content per host, in memory, which all of its ranks can map.

The first rank of each host holds a memfd, and the others open it by /proc/PID/fd. A rank that may not, because it has no /proc or the
two are in different containers, gets a copy of its own. Content crosses the network once per host, in pieces.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import warnings
from io import BufferedReader
from typing import Iterator, NamedTuple

import torch

from collective_core.errors import CollectiveError
from collective_core.runtime import membership
from collective_core.torch.functions import allgather_object
from collective_core.torch.ops.broadcast import broadcast_

#: Bytes that are read or sent at a time: enough for nearly full bandwidth, nothing beside a model.
PIECE = 2 << 20


class _Offer(NamedTuple):
    """A file in a rank's memory. The numbers of its inode tell it from another one of the same process number."""

    pid: int
    number: int
    device: int
    inode: int


@contextlib.contextmanager
def new_file() -> Iterator[int]:
    """An empty file in this process's memory, by its file descriptor. It goes with the last process that has opened or mapped it."""
    number = os.memfd_create("collective_core", os.MFD_CLOEXEC)
    try:
        yield number
    finally:
        os.close(number)


def fill(number: int, source: BufferedReader) -> str:
    """Appends the rest of ``source`` to a file. Returns its SHA-256, in hexadecimal digits. Raises OSError."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(PIECE))
    while got := source.readinto(buffer):
        digest.update(buffer[:got])
        _write(number, buffer[:got])
    return digest.hexdigest()


def path_of(number: int, pid: int | None = None) -> str:
    """The name by which an open file can be opened again, by this process or by another one."""
    return f"/proc/{'self' if pid is None else pid}/fd/{number}"


@contextlib.contextmanager
def shared(source: int, length: int, digest: str) -> Iterator[int]:
    """Rank 0's file ``source`` of ``length`` bytes, on every rank, by its file descriptor. Collective.

    ``digest``: the SHA-256 of what it holds, which is compared where it has come from rank 0. Raises :class:`CollectiveError` (kind
    ``invalid``) on every rank when one cannot hold it, or something else has arrived.
    """
    me = membership.current()
    first = next(peer.rank for peer in me.peers if peer.host_id == me.peers[me.rank].host_id)
    with contextlib.ExitStack() as opened:
        number, error = source if me.rank == 0 else -1, ""
        if me.rank == first != 0:
            number, error = _try_new(opened)
        offers = allgather_object(_offer(number), "host_copy.offers")
        if me.rank != first:
            number = _open(offers[first], opened)
        is_alone = me.rank != first and number < 0 and offers[first].pid != 0
        if is_alone:
            number, error = _try_new(opened)
        receives = allgather_object((me.rank == first != 0 or is_alone, is_alone), "host_copy.receives")
        if any(one for one, _ in receives):
            holder = number if receives[me.rank][0] else -1
            problem = _distribute(source, holder, length, digest)  # of all ranks, also of one that has failed already
            error = error or problem
        alone = ", ".join(str(rank) for rank, (_, one) in enumerate(receives) if one)
        for rank, problem in enumerate(allgather_object(error, "host_copy.done")):
            if problem:
                raise CollectiveError(problem, "invalid", (rank,))
        if alone and me.rank == 0:  # at the end: a program may have made an error of it, and the others must not wait for this rank
            text = f"ranks {alone} may not open the files of their host's first rank (/proc/PID/fd): each holds a copy of its own"
            warnings.warn(text, stacklevel=3)
        yield number


def _try_new(opened: contextlib.ExitStack) -> tuple[int, str]:
    """A new file, or -1 and why there is none."""
    try:
        return opened.enter_context(new_file()), ""
    except OSError as error:
        return -1, f"there is no memory for a checkpoint on {socket.gethostname()}: {error.strerror}"


def _offer(number: int) -> _Offer:
    if number < 0:
        return _Offer(0, 0, 0, 0)
    found = os.fstat(number)
    return _Offer(os.getpid(), number, found.st_dev, found.st_ino)


def _open(offer: _Offer, opened: contextlib.ExitStack) -> int:
    """The file that another process offers; -1 where it cannot be opened, or another file has its name."""
    try:
        number = os.open(path_of(offer.number, offer.pid), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1
    opened.callback(os.close, number)
    found = os.fstat(number)
    return number if (found.st_dev, found.st_ino) == (offer.device, offer.inode) else -1


def _distribute(source: int, target: int, length: int, digest: str) -> str:
    """Rank 0's ``source`` to the ``target`` of every rank that has one (-1: none). Collective. What has gone wrong here, or nothing."""
    error, arrived, is_root = "", hashlib.sha256(), membership.rank() == 0
    buffer = torch.empty(min(PIECE, length), dtype=torch.uint8)
    for at in range(0, length, PIECE):
        piece = buffer[: min(PIECE, length - at)]
        memory = memoryview(piece.numpy())
        if is_root:
            os.preadv(source, [memory], at)
        broadcast_(piece, 0, "host_copy.piece")
        if target >= 0 and not error:
            arrived.update(memory)
            try:
                _write(target, memory)
            except OSError as failure:
                error = f"there is no memory for a checkpoint on {socket.gethostname()}: {failure.strerror}"
    if target >= 0 and not error and arrived.hexdigest() != digest:
        error = f"what has arrived on {socket.gethostname()} is not the checkpoint that rank 0 has read: its checksum is wrong"
    return error


def _write(number: int, data: memoryview) -> None:
    while data:
        data = data[os.write(number, data) :]
