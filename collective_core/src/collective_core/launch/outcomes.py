"""What became of a job's ranks: every one's result, or the failure that was the first cause."""

from __future__ import annotations

import json
import signal
import sys
from typing import Any, Mapping

from collective_core.errors import CollectiveError
from collective_core.launch import frames, function
from collective_core.launch.frames import Frame

#: Kinds of CollectiveError that another rank's failure causes.
CONSEQUENCES = ("peer_lost", "closed")
#: In the place of an exit code: the way to the rank's host is gone.
LOST = -1000


class RankFailedError(CollectiveError):
    """A rank raised an exception or died. ``rank``, ``host``, ``exception`` (its type's name) and ``remote_traceback`` say more.

    ``exit_code``: of its process, negative for a signal, when it ended without raising.
    """

    def __init__(self, rank: int, host: str, said: Mapping[str, str] | None, exit_code: int) -> None:
        self.rank, self.host, self.exit_code = rank, host, exit_code
        self.exception = said["type"] if said else ""
        self.remote_traceback = said["traceback"] if said else ""
        who = f"rank {rank} on {host}"
        if said:
            text = f"{who} raised {said['type']}: {said['text']}"
            text += f"\n\nTraceback of {who}:\n{said['traceback']}" if said["traceback"] else ""
        elif exit_code == LOST:
            text = f"the way to {who} is gone"
        elif exit_code < 0:
            text = f"{who} was ended by {signal.Signals(-exit_code).name}"
        else:
            text = f"{who} ended with exit code {exit_code} before its function returned"
        super().__init__(text, "peer_lost", (rank,))


class Outcomes:
    """Collects the frames of a job's ranks (processes.py). ``host_of``: every rank's host, for messages."""

    def __init__(self, host_of: Mapping[int, str]) -> None:
        self._host_of = host_of
        self._values: dict[int, bytes] = {}
        self._raised: dict[int, dict[str, str]] = {}
        self._codes: dict[int, int] = {}  # in the order in which ranks end

    def note(self, frame: Frame) -> None:
        if frame.kind == "value":
            self._values[frame.rank] = frame.body
        elif frame.kind == "raised":
            self._raised[frame.rank] = json.loads(frame.body)
        elif frame.kind == "exit":
            self._codes[frame.rank] = frames.code_of(frame)

    @property
    def complete(self) -> bool:
        """Whether all ranks have ended."""
        return len(self._codes) == len(self._host_of)

    @property
    def failed(self) -> list[int]:
        """Ranks that have ended without a result, in the order in which they did."""
        return [rank for rank, code in self._codes.items() if code != 0 or rank not in self._values]

    def results(self) -> list[Any]:
        """What each rank returned. Raises :class:`RankFailedError` for the rank whose failure was not caused by another's."""
        if self.failed:
            rank = min(self.failed, key=lambda r: self._raised.get(r, {}).get("kind", "") in CONSEQUENCES)
            raise RankFailedError(rank, self._host_of[rank], self._raised.get(rank), self._codes[rank])
        return [function.unpack(self._values[rank]) for rank in range(len(self._host_of))]


def show(frame: Frame, prefix: bool) -> None:
    """Writes a rank's line of output to this process's."""
    line = frame.body.decode(errors="replace")
    stream = sys.stdout if frame.kind == "out" else sys.stderr
    stream.write(f"[{frame.rank}] {line}" if prefix else line)
    if not line.endswith("\n"):
        stream.write("\n")
    stream.flush()
