"""The output of a job, split by rank: shown, kept in files, and searched for the failure that came first.

A rank that fails takes others down with it, so the last traceback is rarely the cause: the first one that is not about a lost peer is.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import IO

from provision.remote.progress import Progress

#: Before what a rank wrote, by both launchers: ``[job,rank]<stream>:``. mpirun puts it wherever a write ended, in the middle of a line too.
_TAG = re.compile(r"\[\d+,(?P<rank>\d+)\]<(?P<stream>\w+)>:")
_BEGIN = "Traceback (most recent call last)"
#: The last line of a traceback that is a symptom of another rank's end.
_SYMPTOM = re.compile(
    r"(CollectiveError|HorovodInternalError)\b.*\b(died|is gone|went away|shut its engine down|stopped after an earlier failure)\b"
)
#: Before the messages of the engine's own launcher.
_OWN = "collective_core.launch: "
_MOST_LINES = 200  # of one traceback
_COLOURS = ("cyan", "green", "magenta", "blue", "yellow", "bright_cyan", "bright_green", "bright_magenta")


def readable(line: str) -> str:
    """A line of a job with its tags turned into ``rank 3: ``; the standard output of rank 0, which shows the progress, without."""
    return _TAG.sub(lambda tag: "" if tag["rank"] == "0" and tag["stream"] == "stdout" else f"rank {tag['rank']}: ", line)


class RankOutput:
    """Takes a launcher's lines, one per call.

    Args:
        progress: shows the lines of the launcher and of the ranks.
        ranks: how many there are.
        folder: where each rank's output is kept as ``rank.N/stdout`` and ``rank.N/stderr``, as horovodrun lays it out: N with leading
            zeros, so that names sort; None keeps none.
        quiet: show rank 0 only.
        timestamps: begin each line of a rank with the time.

    Attributes:
        verdict: which rank failed first, as the engine's own launcher says it; mpirun does not.
    """

    def __init__(
        self, progress: Progress, ranks: int = 1, folder: Path | None = None, *, quiet: bool = False, timestamps: bool = False
    ) -> None:
        self._progress = progress
        self._folder = folder
        self._quiet = quiet
        self._timestamps = timestamps
        self._digits = len(str(max(ranks - 1, 0)))
        self.verdict: str | None = None
        self._files: dict[Path, IO[str]] = {}
        self._partial: dict[tuple[int, str], str] = {}  # lines without their end
        self._open: dict[int, list[str]] = {}  # tracebacks without their last line
        self._failures: list[tuple[int, list[str]]] = []

    def __call__(self, line: str) -> None:
        head, *parts = _TAG.split(line)
        if head.strip() or not parts:
            self._progress.line(head)  # the launcher's own message
            if head.startswith(_OWN):
                self.verdict = head[len(_OWN) :]
        for at in range(0, len(parts), 3):
            rank, stream, text = int(parts[at]), parts[at + 1], parts[at + 2]
            self._partial[rank, stream] = self._partial.get((rank, stream), "") + text
            if at + 3 == len(parts):  # mpirun tags every write: a rank's line ends with the last of them
                self._take(rank, stream, self._partial.pop((rank, stream)))

    def _take(self, rank: int, stream: str, text: str) -> None:
        if self._folder is not None:
            self._file(self._folder / f"rank.{rank:0{self._digits}}" / stream).write(text + "\n")
        if stream == "stderr":
            self._follow(rank, text)
        if not self._quiet or rank == 0:
            when = f"{time.strftime('%a %b %d %H:%M:%S %Y')} " if self._timestamps else ""
            show = self._progress.output if stream == "stdout" else self._progress.errors
            show(f"{when}[{rank}] ", text, _COLOURS[rank % len(_COLOURS)])

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
        """(rank, its traceback): the first that is not about another rank's end, else that of ``first``, the rank that ended first.

        Where ``first`` is None it is the first of all, unless the launcher has named a rank.
        """
        causes = [(rank, lines) for rank, lines in self._failures if not _SYMPTOM.search(lines[-1])]
        others = [] if self.verdict else self._failures
        return next(iter(causes or [each for each in others if first in (None, each[0])]), None)

    def close(self) -> None:
        """Show lines that have no end, and close the files."""
        for (rank, stream), text in self._partial.items():
            self._take(rank, stream, text)
        self._partial.clear()
        for file in self._files.values():
            file.close()
