"""One rank's part of a timeline: a file beside the timeline's, to which events are appended while the job runs.

It can be read at every moment, also after SIGKILL: a head, which is written anew with every piece, and the engine's own records.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import struct
from typing import Iterable, Iterator, NamedTuple, Sequence

from collective_core.errors import CollectiveError
from collective_core.observe import recorder
from collective_core.observe.clocks import Clock, corrected

MAGIC = b"cctl0001"
_head = struct.Struct("=8s16sqiiqdqdqqQQ64s")
#: Events that are read at a time.
AT_ONCE = 4096


class Head(NamedTuple):
    """Header of a part: whose it is, and what its events do not say. Times: nanoseconds of this rank's clock."""

    token: bytes  # 16 random bytes, by which the file is known
    job: int  # the same in all parts of a job
    rank: int
    generation: int  # of an elastic job, 0 in others
    first: Clock
    last: Clock  # the first one again until the timeline has come to a good end
    begin: int
    end: int
    waited: int  # nanoseconds in which the program waited for collectives
    lost: int  # events that were overwritten before they were collected
    host_name: str

    def pack(self) -> bytes:
        clocks = *self.first, *self.last
        numbers = self.job, self.rank, self.generation, *clocks, self.begin, self.end, self.waited, self.lost
        return _head.pack(MAGIC, self.token, *numbers, self.host_name.encode()[:64])


class Part(NamedTuple):
    """One rank's timeline. ``events`` can be gone through more than once."""

    head: Head
    events: Iterable[recorder.Event]

    def at(self, moment: int) -> float:
        """A moment of this rank's clock in microseconds of rank 0's."""
        return corrected(moment, self.head.first, self.head.last) / 1e3


def path_of(timeline: str, rank: int, generation: int = 0, sent: bool = False) -> str:
    """The file of a rank's part, beside the timeline's. ``sent``: rank 0's copy of one that lies on another host."""
    of_generation = f".generation{generation:04d}" if generation else ""
    return f"{timeline}.rank{rank:04d}{of_generation}{'.sent' if sent else ''}.events"


def find(timeline: str) -> list[str]:
    """The files of parts that lie beside this timeline."""
    pattern = re.compile(r"\.rank\d{4,}(\.generation\d{4,})?(\.sent)?\.events")
    paths = sorted(glob.glob(glob.escape(timeline) + ".rank*.events"))
    return [path for path in paths if pattern.fullmatch(path[len(timeline) :])]


class _File:
    """A new file, which only its owner can read; an old one of its name goes. Everything here raises OSError."""

    def __init__(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def put(self, data: memoryview, at: int) -> None:
        while data:
            done = os.pwrite(self._fd, data, at)
            data, at = data[done:], at + done

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


class Writer(_File):
    """A part while it grows. Where writing fails, what was there before stays as it is."""

    def __init__(self, path: str, head: Head) -> None:
        super().__init__(path)
        self.path, self.head = path, head
        self._events = 0
        self.write_head(head)

    def append(self, events: memoryview, head: Head) -> None:
        """Adds whole events, as the engine packs them, and what the head says from now on."""
        self.put(events, _head.size + self._events * recorder.EVENT_BYTES)
        self._events += len(events) // recorder.EVENT_BYTES
        self.write_head(head)

    def write_head(self, head: Head) -> None:
        self.put(memoryview(head.pack()), 0)
        self.head = head


class Copies:
    """Parts that come piece by piece. A problem with writing them is remembered: who sends them goes on, and is told at the end."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.problem = ""
        self._files: dict[str, _File] = {}
        self._lengths = [0] * len(paths)
        try:
            for path in paths:
                self._files[path] = _File(path)
        except OSError as error:
            self._give_up(error)

    def add(self, pieces: Iterable[memoryview]) -> None:
        """The next piece of every part, which may be empty."""
        try:
            for number, (file, piece) in enumerate(zip(self._files.values(), pieces)):
                file.put(piece, self._lengths[number])
                self._lengths[number] += len(piece)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self.problem = str(error)
        self.close()
        for path in self._files:
            os.unlink(path)
        self._files = {}

    def close(self) -> None:
        for file in self._files.values():
            file.close()


class _Events:
    """Events in a part's file after its head, a few events at a time in memory; one that was cut off in mid-write is left out."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __iter__(self) -> Iterator[recorder.Event]:
        with open(self._path, "rb") as file:
            file.seek(_head.size)
            while raw := file.read(AT_ONCE * recorder.EVENT_BYTES):
                yield from recorder.unpack_all(raw)


def read(path: str) -> Part:
    """A rank's part. Raises :class:`CollectiveError` (kind ``invalid``) if the file is none, OSError as ``open`` does."""
    with open(path, "rb") as file:
        raw = file.read(_head.size)
    if len(raw) < _head.size or raw[: len(MAGIC)] != MAGIC:
        raise CollectiveError(f"{path} is not a rank's part of a timeline of this version", "invalid")
    _, token, job, rank, generation, at, offset, last_at, last_offset, begin, end, waited, lost, host = _head.unpack(raw)
    clocks = Clock(at, offset), Clock(last_at, last_offset)
    name = host.split(b"\0", 1)[0].decode("utf-8", "replace")
    return Part(Head(token, job, rank, generation, *clocks, begin, end, waited, lost, name), _Events(path))
