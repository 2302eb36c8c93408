"""Tracebacks in what ranks print, and the one to read: of the rank that failed first, not of those that it took along."""

from __future__ import annotations

from typing import Callable, Sequence

from collective_core.errors import PeerLostError
from collective_core.launch.frames import Frame

BEGIN = b"Traceback (most recent call last):"
#: Before a traceback that goes on from the one above it.
LINKS = (b"During handling of the above exception", b"The above exception was the direct cause")
#: After so many more lines a rank has survived what its traceback tells of.
MAX_LINES = 200


class Tracebacks:
    """``show``: gets what the ranks print. Keeps each one's last traceback and what the rank says after it.

    Unless ``raw``, a traceback is shown in one piece; of one that tells of another rank's failure, or that another rank has printed
    already, one line is: at the end, or before what its rank prints next.
    """

    def __init__(self, show: Callable[[Frame], None], raw: bool = False) -> None:
        self._show = show
        self._raw = raw
        self._kept: dict[int, list[Frame]] = {}  # by rank, in the order in which they began
        self._shown: dict[int, int] = {}  # how many lines of them
        self._twins: dict[int, int] = {}  # rank → the one that had printed the same
        self._partial: set[int] = set()  # ranks whose tracebacks go on
        self._latest: Frame | None = None

    def __call__(self, frame: Frame) -> None:
        if (frame.kind == "err" and self._keep(frame)) and not self._raw:
            return
        if not self._raw:
            self._release(frame.rank)
        self._put(frame)

    def _put(self, frame: Frame) -> None:
        self._show(frame)
        self._latest = frame

    def _keep(self, frame: Frame) -> bool:
        """Whether it is a traceback's line, which is shown with the others."""
        rank, begins = frame.rank, frame.body.startswith(BEGIN)
        lines = self._kept.get(rank, [])
        if begins and not any(line.body.startswith(LINKS) for line in lines[-2:]):
            self._survived(rank)  # a new one is behind those of others
            lines = self._kept[rank] = []
        elif not lines:
            return False
        elif len(lines) == MAX_LINES:
            self._survived(rank)
            return False
        lines.append(frame)
        if begins:
            self._partial.add(rank)
        elif rank in self._partial:
            if frame.body.strip() and not frame.body.startswith(b" "):
                self._partial.discard(rank)
                twin = None if _is_consequence(lines) else self._twin_of(rank)
                self._twins.pop(rank, None)
                if twin is not None:
                    self._twins[rank] = twin
                if self._shown.get(rank) or (twin is None and not _is_consequence(lines)):
                    self._show_all(rank)
        elif not self._shown.get(rank) and (not frame.body.strip() or frame.body.startswith(LINKS)):
            return True
        else:
            lines.pop()
            self._release(rank)
            lines.append(frame)
            self._shown[rank] = len(lines)
            return False
        return True

    def _twin_of(self, rank: int) -> int | None:
        """The rank of which the same was shown: the same error at the same place, which of the engine's concerns all ranks."""
        mine, text = self.place_of(rank), self._exception(rank)
        for other in self._kept if mine else ():
            of_all = _type_of(text) == "CollectiveError"
            if (
                other not in (rank, *self._twins)
                and self._shown.get(other)
                and self.place_of(other) == mine
                and (of_all or self._exception(other) == text)
            ):
                return other
        return None

    def _exception(self, rank: int) -> bytes:
        """The line of the last exception."""
        return next((line.body for line in reversed(self._kept[rank]) if line.body.strip() and not line.body.startswith(b" ")), b"\n")

    def _show_all(self, rank: int) -> None:
        if self._raw:
            return
        lines = self._kept.get(rank, [])
        for line in lines[self._shown.get(rank, 0) :]:
            self._put(line)
        self._shown[rank] = len(lines)

    def _release(self, rank: int) -> None:
        """Shows the one line of a traceback that has been held back."""
        if rank in self._kept and rank not in self._partial and not self._shown.get(rank) and not self._raw:
            twin = self._twins.get(rank)
            text = self._exception(rank) if twin is None else b"the same error as that of rank %d\n" % twin
            self._put(Frame("err", rank, text))
            self._shown[rank] = len(self._kept[rank])

    def _survived(self, rank: int) -> None:
        self.show_held([rank])
        self._kept.pop(rank, None)
        self._shown.pop(rank, None)
        self._twins.pop(rank, None)
        self._partial.discard(rank)

    def show_held(self, ranks: Sequence[int] | None = None) -> None:
        """Shows what has been held back: of each rank a line, or what it had printed of a traceback when it was ended."""
        for rank in () if self._raw else list(self._kept) if ranks is None else ranks:
            if rank in self._partial:
                self._show_all(rank)
            self._release(rank)

    def place_of(self, rank: int) -> str:
        """As of the function of this name, of the rank's last traceback."""
        return place_of([line.body for line in self._kept.get(rank, [])])

    def forget(self) -> None:
        """What follows is of other ranks, which have the same numbers."""
        self.show_held()
        self._kept.clear()
        self._shown.clear()
        self._twins.clear()
        self._partial.clear()
        self._latest = None

    def cause_of(self, rank: int) -> int:
        """The rank whose traceback explains the failure of ``rank``: the first that does not tell of another's end, if its own does."""
        if not _is_consequence(self._kept.get(rank, [])):
            return self._twins.get(rank, rank)
        found = next((other for other, lines in self._kept.items() if not _is_consequence(lines)), rank)
        return self._twins.get(found, found)

    def are_consequences(self) -> bool:
        """Whether ranks have raised errors, and each of these tells of another rank's end."""
        return bool(self._kept) and all(_is_consequence(lines) for lines in self._kept.values())

    def has_any(self, rank: int) -> bool:
        """Whether that rank has raised an error."""
        return rank in self._kept

    def show_cause(self, rank: int) -> None:
        """Shows the traceback that explains the failure of ``rank``, unless it is what was shown last anyway."""
        cause = self.cause_of(rank)
        found = self._kept.get(cause, [])
        if found and found[-1] is not self._latest and not self._raw:
            self._shown[cause] = 0
            self._show_all(cause)


def place_of(lines: Sequence[bytes]) -> str:
    """Where a traceback's exception came from and its type, the same wherever a program makes the same mistake.

    Without the exception's text, which may name a rank or an address. Empty for no traceback, and for one that tells of another rank's
    failure.
    """
    begins = [number for number, line in enumerate(lines) if line.startswith(BEGIN)]
    last = lines[begins[-1] + 1 :] if begins else []
    end = next((number for number, line in enumerate(last) if not line.startswith(b" ")), None)
    if end is None or _type_of(last[end]) == PeerLostError.__name__:
        return ""
    return b"\n".join([*(line.rstrip() for line in last[:end]), last[end].split(b":")[0].rstrip()]).decode(errors="replace")


def _type_of(line: bytes) -> str:
    """The name of the exception's type that this last line of a traceback tells of."""
    return line.split(b":")[0].rstrip().rpartition(b".")[2].decode(errors="replace")


def _is_consequence(lines: list[Frame]) -> bool:
    return any(_type_of(line.body) == PeerLostError.__name__ for line in lines)
