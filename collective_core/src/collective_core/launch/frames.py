"""Messages over a pipe or an ssh connection: a kind, a rank, a body. Both ends are ours and inherited, so nobody else writes there."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

#: kind (ASCII, padded with spaces), rank, length of the body.
_head = struct.Struct("!8siQ")
_end = struct.Struct("!id")
#: For messages of no rank in particular.
NO_RANK = -1


class Frame(NamedTuple):
    kind: str
    rank: int
    body: bytes


def write(stream: Any, *those: Frame) -> None:
    """Writes and flushes them; bodies are not copied. ``stream``: a binary file, buffered or not."""
    for frame in those:
        for part in (_head.pack(frame.kind.encode().ljust(8), frame.rank, len(frame.body)), frame.body):
            left = memoryview(part)
            while left:
                left = left[stream.write(left) :]
    stream.flush()


def read(stream: Any, most: int | None = None) -> Frame | None:
    """The next one; None at the end of the stream, also in the middle of a frame: whoever wrote it is gone.

    Raises ValueError for a body of more than ``most`` bytes, and MemoryError where there is not so much memory.
    """
    head = _exactly(stream, _head.size)
    if head is None:
        return None
    kind, rank, length = _head.unpack(head)
    if most is not None and length > most:
        raise ValueError(f"a message of {length} bytes")
    body = _exactly(stream, length)
    return None if body is None else Frame(kind.decode(errors="replace").strip(), rank, body)


def _exactly(stream: Any, size: int) -> bytes | None:
    whole = bytearray(size)
    left = memoryview(whole)
    while left:
        got = stream.readinto(left)
        if not got:
            return None
        left = left[got:]
    return whole  # type: ignore[return-value]  # used as bytes; a copy would need the memory twice


def exit_of(rank: int, code: int, ago: float = 0.0) -> Frame:
    """Says that a rank has ended so many seconds ago, with this exit code: minus the signal's number if one ended it."""
    return Frame("exit", rank, _end.pack(code, ago))


def code_of(frame: Frame) -> int:
    """The exit code in such a frame."""
    return int(_end.unpack(frame.body)[0])


def seconds_since(frame: Frame) -> float:
    """How long the rank had ended when the frame was sent: its last output and what it had started came first."""
    return float(_end.unpack(frame.body)[1])
