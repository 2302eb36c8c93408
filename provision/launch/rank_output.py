"""What the ranks of a job print, taken apart by rank: shown, kept in files, and searched for the failure that came first.

The launchers, mpirun and the engine's own, write the same tags.

A rank that fails takes others down with it, so that the last
traceback is rarely the one to read: the first one that is not about a lost peer is.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from provision.launch import mpirun

_BEGIN = "Traceback (most recent call last)"
#: How a traceback ends that tells of another rank's death.
_CONSEQUENCE = re.compile(
    r"(CollectiveError|HorovodInternalError)\b.*\b(died|is gone|went away|shut its engine down|stopped after an earlier failure)\b"
)
#: Before what the engine's own launcher says itself.
_OWN = "collective_core.launch: "
_MOST_LINES = 200  # of one traceback
Show = Callable[[str, str | None], None]
ShowRank = Callable[[str, str, str], None]
_COLOURS = ("cyan", "green", "magenta", "blue", "yellow", "bright_cyan", "bright_green", "bright_magenta")


class RankOutput:
    """Takes a launcher's lines; ``show(text, style)`` gets the launcher's own words.

    Args:
        output, errors: get (tag, text, style) of what ranks print on standard output and on standard error.
        folder: where each rank's output is kept as ``rank.N/stdout`` and ``rank.N/stderr``, as horovodrun lays it out: N with leading
            zeros, so that names sort; None keeps none.
        quiet: show rank 0 only.
        ranks: how many there are.
        timestamps: begin what is shown with the time.

    Attributes:
        verdict: who failed first, as our own launcher says it; mpirun does not.
    """

    def __init__(
        self,
        show: Show,
        output: ShowRank,
        errors: ShowRank,
        folder: Path | None = None,
        *,
        quiet: bool = False,
        ranks: int = 1,
        timestamps: bool = False,
    ) -> None:
        self._show, self._output, self._errors = show, output, errors
        self._folder = folder
        self._quiet = quiet
        self._timestamps = timestamps
        self._digits = len(str(max(ranks - 1, 0)))
        self.verdict: str | None = None
        self._files: dict[Path, IO[str]] = {}
        self._begun: dict[tuple[int, str], str] = {}  # lines that have not come to their end
        self._open: dict[int, list[str]] = {}  # tracebacks that have not come to their last line
        self._failures: list[tuple[int, list[str]]] = []

    def __call__(self, line: str) -> None:
        head, *parts = mpirun.TAG.split(line)
        if head.strip() or not parts:
            self._show(head, None)  # the launcher's own words
            if head.startswith(_OWN):
                self.verdict = head[len(_OWN) :]
        for at in range(0, len(parts), 3):
            rank, stream, text = int(parts[at]), parts[at + 1], parts[at + 2]
            self._begun[rank, stream] = self._begun.get((rank, stream), "") + text
            if at + 3 == len(parts):  # mpirun tags every write; the line of a rank ends with the line of its last one
                self._take(rank, stream, self._begun.pop((rank, stream)))

    def _take(self, rank: int, stream: str, text: str) -> None:
        if self._folder is not None:
            self._file(self._folder / f"rank.{rank:0{self._digits}}" / stream).write(text + "\n")
        if stream == "stderr":
            self._follow(rank, text)
        if not self._quiet or rank == 0:
            when = f"{time.strftime('%a %b %d %H:%M:%S %Y')} " if self._timestamps else ""
            (self._output if stream == "stdout" else self._errors)(f"{when}[{rank}] ", text, _COLOURS[rank % len(_COLOURS)])

    def _file(self, path: Path) -> IO[str]:
        if path not in self._files:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._files[path] = path.open("w", encoding="utf-8", buffering=1)
        return self._files[path]

    def _follow(self, rank: int, text: str) -> None:
        if text.startswith(_BEGIN):
            self._open[rank] = [text]
        elif rank in self._open:
            self._open[rank].append(text)
            if (text and not text.startswith(" ")) or len(self._open[rank]) > _MOST_LINES:
                self._failures.append((rank, self._open.pop(rank)))

    def first_failure(self, first: int | None = None) -> tuple[int, list[str]] | None:
        """(rank, its traceback): the first that is not about another rank's end; else that of ``first``, the rank that ended first.

        Where nobody says which that is, the first of all, unless the launcher knows better.
        """
        causes = [(rank, lines) for rank, lines in self._failures if not _CONSEQUENCE.search(lines[-1])]
        others = [] if self.verdict else self._failures
        return next(iter(causes or [each for each in others if first in (None, each[0])]), None)

    def close(self) -> None:
        """Show what came without an end of line, and close the files."""
        for (rank, stream), text in self._begun.items():
            self._take(rank, stream, text)
        self._begun.clear()
        for file in self._files.values():
            file.close()
