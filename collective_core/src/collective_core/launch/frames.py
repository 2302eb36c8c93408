"""Messages over a pipe or an ssh connection: a kind, a rank, a body. Both ends are ours and inherited, so nobody else writes there."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

#: kind (ASCII, padded with spaces), rank, length of the body.
_head = struct.Struct("!8siQ")
_code = struct.Struct("!i")
#: For messages of no rank in particular.
NO_RANK = -1


class Frame(NamedTuple):
    kind: str
    rank: int
    body: bytes


class Job(NamedTuple):
    """What a rank gets: ``settings`` (JSON: ``environment``, ``path``), and the ``call`` that function.py has packed."""

    settings: bytes
    call: bytes

    def frames(self, rank: int) -> tuple[Frame, Frame]:
        return Frame("settings", rank, self.settings), Frame("call", rank, self.call)


def write(stream: Any, *those: Frame) -> None:
    """Writes them in one piece and flushes. ``stream``: a binary file."""
    stream.write(b"".join(_head.pack(f.kind.encode().ljust(8), f.rank, len(f.body)) + f.body for f in those))
    stream.flush()


def read(stream: Any) -> Frame | None:
    """The next one; None at the end of the stream, also in the middle of a frame: whoever wrote it is gone."""
    head = _exactly(stream, _head.size)
    if head is None:
        return None
    kind, rank, length = _head.unpack(head)
    body = _exactly(stream, length)
    return None if body is None else Frame(kind.decode().strip(), rank, body)


def _exactly(stream: Any, size: int) -> bytes | None:
    parts = []
    while size:
        part = stream.read(size)
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def exit_of(rank: int, code: int) -> Frame:
    """Says that a rank has ended, with this exit code: minus the signal's number if one ended it."""
    return Frame("exit", rank, _code.pack(code))


def code_of(frame: Frame) -> int:
    """The exit code in such a frame."""
    return int(_code.unpack(frame.body)[0])
