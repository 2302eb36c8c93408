"""What ranks print, and in it the traceback to read last: of the rank that failed first, not of those that it took along."""

from __future__ import annotations

import re
from typing import Callable, Sequence

from collective_core.launch.frames import Frame

BEGIN = b"Traceback (most recent call last):"
#: Before a traceback that goes on from the one above it.
LINKS = (b"During handling of the above exception", b"The above exception was the direct cause")
#: How a traceback ends that tells of another rank's failure.
CONSEQUENCE = re.compile(
    rb"^\S*(CollectiveError|HorovodInternalError)\b.*\b(died|is gone|went away|shut its engine down|stopped after an earlier failure)\b"
)
#: After so many more lines a rank has survived what its traceback tells of.
MOST_LINES = 200


class Tracebacks:
    """``show``: gets what the ranks print. Keeps each one's last traceback and what the rank says after it."""

    def __init__(self, show: Callable[[Frame], None]) -> None:
        self._show = show
        self._kept: dict[int, list[Frame]] = {}  # by rank, in the order in which they began
        self._latest: Frame | None = None

    def __call__(self, frame: Frame) -> None:
        self._show(frame)
        self._latest = frame
        if frame.kind == "err":
            self._keep(frame)

    def _keep(self, frame: Frame) -> None:
        lines = self._kept.get(frame.rank, [])
        goes_on = any(line.body.startswith(LINKS) for line in lines[-2:])
        if frame.body.startswith(BEGIN) and not goes_on:
            self._kept.pop(frame.rank, None)  # a new one is behind those of others
            self._kept[frame.rank] = [frame]
        elif len(lines) == MOST_LINES:
            del self._kept[frame.rank]
        elif lines:
            lines.append(frame)

    def place_of(self, rank: int) -> str:
        """As of the function of this name, of the rank's last traceback."""
        return place_of([line.body for line in self._kept.get(rank, [])])

    def forget(self) -> None:
        """What follows is of other ranks, which have the same numbers."""
        self._kept.clear()
        self._latest = None

    def cause_of(self, rank: int) -> int:
        """The rank whose traceback explains the failure of ``rank``: the first that does not tell of another's end, if its own does."""
        if not _is_consequence(self._kept.get(rank, [])):
            return rank
        return next((other for other, lines in self._kept.items() if not _is_consequence(lines)), rank)

    def to_read_last(self, rank: int) -> list[Frame]:
        """The traceback that explains the failure of ``rank``. Nothing if that is what was shown last anyway."""
        found = self._kept.get(self.cause_of(rank), [])
        return [] if found and found[-1] is self._latest else found


def place_of(lines: Sequence[bytes]) -> str:
    """Where a traceback's exception came from and its type, the same wherever a program makes the same mistake.

    Without the exception's text, which may name a rank or an address. Empty for no traceback, and for one that tells of another rank's
    failure.
    """
    begins = [number for number, line in enumerate(lines) if line.startswith(BEGIN)]
    last = lines[begins[-1] + 1 :] if begins else []
    end = next((number for number, line in enumerate(last) if not line.startswith(b" ")), None)
    if end is None or CONSEQUENCE.search(last[end]):
        return ""
    return b"\n".join([*(line.rstrip() for line in last[:end]), last[end].split(b":")[0].rstrip()]).decode(errors="replace")


def _is_consequence(lines: list[Frame]) -> bool:
    return any(CONSEQUENCE.search(line.body) for line in lines)
