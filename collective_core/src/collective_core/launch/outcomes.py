"""Outcomes of a job's ranks: every one's result, or the failure that was the first cause."""

from __future__ import annotations

import json
import signal
import sys
import time
from typing import Any, Mapping

from collective_core.errors import CollectiveError
from collective_core.launch import frames, function
from collective_core.launch.frames import Frame

#: Kinds of CollectiveError that another rank's failure causes.
CONSEQUENCES = ("peer_lost", "closed")
#: In the place of an exit code: the rank could not be started, or the way to its host is gone.
LOST = -1000


class RankFailedError(CollectiveError):
    """A rank raised an exception or died. ``rank``, ``host``, ``exception`` (its type's name) and ``remote_traceback`` say more.

    ``exit_code``: of its process, negative for a signal, when it ended without raising.
    """

    def __init__(self, message: str, rank: int, host: str, exit_code: int = 0, exception: str = "", remote_traceback: str = "") -> None:
        super().__init__(message, "peer_lost", (rank,))
        self.rank, self.host, self.exit_code = rank, host, exit_code
        self.exception, self.remote_traceback = exception, remote_traceback

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.rank, self.host, self.exit_code, self.exception, self.remote_traceback)


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; the number itself for those without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Outcomes:
    """Collects the frames of a job's ranks (processes.py). ``host_of``: every rank's host, for messages."""

    def __init__(self, host_of: Mapping[int, str]) -> None:
        self._host_of = host_of
        self._values: dict[int, bytes] = {}
        self._raised: dict[int, dict[str, str]] = {}
        self._lost: dict[int, str] = {}
        self._codes: dict[int, int] = {}
        self._failed_at: dict[int, float] = {}  # of time.monotonic()

    def note(self, frame: Frame) -> None:
        if frame.kind == "value":
            self._values[frame.rank] = frame.body
        elif frame.kind == "raised":
            self._raised[frame.rank] = json.loads(frame.body)
        elif frame.kind == "lost":
            self._lost[frame.rank] = frame.body.decode(errors="replace")
        elif frame.kind == "exit":
            self._codes[frame.rank] = frames.code_of(frame)
        ended_badly = self._codes.get(frame.rank, 0) != 0 or (frame.rank in self._codes and frame.rank not in self._values)
        if frame.kind == "raised" or ended_badly:
            # A rank's last words may take longer than the failure of others that it has caused.
            when = time.monotonic() - (frames.seconds_since(frame) if frame.kind == "exit" else 0.0)
            self._failed_at[frame.rank] = min(when, self._failed_at.get(frame.rank, when))

    @property
    def failed(self) -> list[int]:
        """The ranks that have, in the order in which they did."""
        return sorted(self._failed_at, key=lambda rank: self._failed_at[rank])

    @property
    def returned(self) -> bool:
        """Whether all ranks' functions have returned."""
        return len(self._values) == len(self._host_of)

    def has_ended(self, rank: int) -> bool:
        """Whether the rank's process has."""
        return rank in self._codes

    @property
    def complete(self) -> bool:
        """Whether all ranks have ended."""
        return len(self._codes) == len(self._host_of)

    def results(self) -> list[Any]:
        """What each rank returned. Raises :class:`RankFailedError` for the rank whose failure was not caused by another's."""
        if self.failed:
            raise self._error(min(self.failed, key=lambda r: self._raised.get(r, {}).get("kind", "") in CONSEQUENCES))
        return [function.unpack(self._values[rank]) for rank in range(len(self._host_of))]

    def _error(self, rank: int) -> RankFailedError:
        host, said, code = self._host_of[rank], self._raised.get(rank), self._codes.get(rank, 0)
        who = f"rank {rank} on {host}"
        if said:
            text = f"{who} raised {said['type']}" + (f": {said['text']}" if said["text"] else "")
            text += f"\n\nTraceback of {who}:\n{said['traceback']}" if said["traceback"] else ""
            return RankFailedError(text, rank, host, code, said["type"], said["traceback"])
        if code == LOST:
            text = f"{who} could not be started, or the way to it is gone: {self._lost.get(rank, 'no reason is known')}"
        elif code < 0:
            text = f"{who}: {self._lost[rank]}" if rank in self._lost else f"{who} was ended by {signal_name(-code)}"
        else:
            when = "after" if rank in self._values else "before"
            text = f"{who} ended with exit code {code} {when} its function returned"
        return RankFailedError(text, rank, host, code)


def show(frame: Frame, prefix: bool) -> None:
    """Writes a rank's line of output to this process's. Characters that do not exist there are spelt out."""
    stream = sys.stdout if frame.kind == "out" else sys.stderr
    if stream is None:  # a service without any
        return
    line = frame.body.decode(errors="backslashreplace")
    text = f"[{frame.rank}] {line}" if prefix else line
    if not text.endswith(("\n", "\r")):
        text += "\n"
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()
