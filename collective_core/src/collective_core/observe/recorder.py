"""The engine's record of operations: its layout (csrc/base/recorder.h), and reading it from memory or from a crashed rank's file."""

from __future__ import annotations

import struct
from typing import Iterator, NamedTuple

from collective_core import _native
from collective_core.errors import CollectiveError

STATES = ("none", "running", "done", "failed")

_event = struct.Struct("=IiQqqqqQBBB5x72s")
_head = struct.Struct("=8siiqqqQQ64s")
MAGIC = b"ccfr0001"
RING = 8192
EVENT_BYTES = _event.size


class Event(NamedTuple):
    """One operation of this rank. Times: nanoseconds of CLOCK_MONOTONIC; 0 where it did not get so far."""

    state: str
    process_set: int
    number: int
    queued: int
    started: int
    agreed: int
    ended: int
    bytes: int
    kind: str
    dtype: str
    name: str


class Recording(NamedTuple):
    """A rank's last operations."""

    rank: int
    size: int
    pid: int
    host_name: str
    monotonic: int  # nanoseconds of both clocks at one moment
    real: int
    begun: int  # operations ever
    events: list[Event]


def unpack(raw: bytes) -> Event:
    state, process_set, number, queued, started, agreed, ended, size, kind, dtype, _, name = _event.unpack(raw)
    names = list(_native.DTYPES)
    text = name.split(b"\0", 1)[0].decode("utf-8", "replace")
    return Event(STATES[state], process_set, number, queued, started, agreed, ended, size, _native.OPERATIONS[kind], names[dtype], text)


def unpack_all(raw: bytes) -> Iterator[Event]:
    """The events that lie in ``raw``, one after the other; what is left over is less than one."""
    return (unpack(raw[at : at + _event.size]) for at in range(0, len(raw) - _event.size + 1, _event.size))


def read_file(path: str) -> Recording:
    """What a rank left in its file. Raises :class:`CollectiveError` (kind ``invalid``) if it is none."""
    with open(path, "rb") as file:
        content = file.read()
    if len(content) < _head.size or content[:8] != MAGIC:
        raise CollectiveError(f"{path} is not a flight recorder of this version", "invalid")
    _, rank, size, pid, monotonic, real, begun, _, host = _head.unpack_from(content)
    events = [unpack(content[at : at + _event.size]) for at in range(_head.size, _head.size + RING * _event.size, _event.size)]
    # What still runs keeps its place, however long ago it began.
    known = sorted((e for e in events if e.state == "running" or (e.state != "none" and e.number > begun - RING)), key=lambda e: e.number)
    return Recording(rank, size, pid, host.split(b"\0", 1)[0].decode("utf-8", "replace"), monotonic, real, begun, known)
