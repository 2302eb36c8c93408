"""The output of a job, split by rank: shown, kept in files, and searched for the failure that came first.

A rank that fails takes others down with it, so the last traceback is rarely the cause: the first one that is not about a lost peer is.
A traceback is shown in one piece. Of one that tells of another rank's end, or that another rank has printed already, one line is shown: at
the end of the job, or before what the rank prints next. mpirun's own messages are shown, except those that a rank has failed: which rank,
mpirun only guesses.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from provision.base.text import grouped, joined
from provision.remote.progress import Progress

#: Before what a rank wrote, by both launchers: ``[job,rank]<stream>:``. mpirun puts it wherever a write ended, in the middle of a line too.
_TAG = re.compile(r"\[\d+,(?P<rank>\d+)\]<(?P<stream>\w+)>:")
_BEGIN = "Traceback (most recent call last)"
#: Before a traceback that goes on from the one above it.
_LINKS = ("During handling of the above exception", "The above exception was the direct cause")
#: An error of the engine's, which concerns all ranks: those that raise it at the same place say the same, each from its point of view.
_OF_ALL = re.compile(r"\S*(CollectiveError|PeerLostError)\b")
#: The last line of a traceback that is a symptom of another rank's end.
_SYMPTOM = re.compile(
    r"(PeerLostError\b|HorovodInternalError\b.*\b(died|is gone|went away|shut its engine down|stopped after an earlier failure)\b)"
)
#: The rank of whose end a symptom tells.
_ACCUSED = re.compile(r"\brank (\d+) \(host ")
#: Around a message of mpirun.
_RULE = re.compile(r"-{50,}")
_LONGEST_BOX = 30  # lines
#: The two texts, of Open MPI's help files, that a rank has failed; their line breaks depend on the version.
_SAID_ANYWAY = re.compile(
    r"(Primary|Child) job (\S+ )?terminated normally, but \d+ process(es)? returned a non-zero exit codes?\."
    r"( Per user-direction, the job has been aborted\.)?"
    r"|\S+ detected that one or more processes exited with non-zero status, thus causing the job to be terminated\. "
    r"The first process to do so was: Process name: \S+ Exit code: -?\d+"
)
#: It happens when mpirun's ssh is faster than mpirun, and has no effect.
_NOISE = re.compile(r"\[\S+:\d+\] plm:rsh: Warning: setpgid\([-\d, ]+\) failed in parent\b")
#: Before the messages of the engine's own launcher.
_OWN = "collective_core.launch: "
_MAX_LINES = 200  # of one traceback
_LONGEST_HEADLINE = 300  # characters of an exception, or of what a rank has said
_RECENT = 15  # lines after a traceback with which it is still on the screen
_COLOURS = ("cyan", "green", "magenta", "blue", "yellow", "bright_cyan", "bright_green", "bright_magenta")


@dataclass(eq=False)
class RankTraceback:
    """State of a rank's traceback while it is read, with those that it goes on from and what the rank printed after it.

    Attributes:
        is_whole: its last line has been printed.
        shown: how many of its lines have been, or all of them as one.
        twin: the rank that has printed the same before.
        at: the number of lines shown of the job when this one had been.
    """

    rank: int
    lines: list[str] = field(default_factory=list)
    is_whole: bool = False
    shown: int = 0
    twin: int | None = None
    at: int | None = None

    @property
    def is_symptom(self) -> bool:
        """Whether it tells of another rank's end."""
        return any(_SYMPTOM.search(line) for line in self.lines)

    @property
    def accused(self) -> set[int]:
        """The ranks of whose end it tells."""
        return {int(rank) for line in self.lines if _SYMPTOM.search(line) for rank in _ACCUSED.findall(line)}

    @property
    def exception(self) -> str:
        """Its last exception: type and text, without the type's module."""
        found = [line for line in self.lines[self._last() :] if line and not line.startswith((" ", _BEGIN))]
        return re.sub(r"^(?:\w+\.)+(?=\w+(?::|$))", "", found[0]) if found else ""

    @property
    def place(self) -> str:
        """``file, line N, in function`` of the program, where a library is not it."""
        frames = [line for line in self.lines[self._last() :] if line.startswith("  File ")]
        own = [line for line in frames if "/site-packages/" not in line and "/lib/python" not in line] or frames
        return own[-1].strip().replace("File ", "", 1).replace('"', "") if own else ""

    def is_like(self, other: RankTraceback) -> bool:
        """Whether it is the same error at the same place; its text may say how this rank saw it."""
        mine, its = self.lines[self._last() :], other.lines[other._last() :]
        frames = [[line for line in lines if line.startswith(" ")] for lines in (mine, its)]
        same_error = self.exception == other.exception or all(_OF_ALL.match(one.exception) for one in (self, other))
        return frames[0] == frames[1] and same_error

    @property
    def goes_on(self) -> bool:
        """Whether the traceback that begins now belongs to it."""
        return any(line.startswith(_LINKS) for line in self.lines[-2:])

    def _last(self) -> int:
        """Where the last of its tracebacks begins."""
        return max((number for number, line in enumerate(self.lines) if line.startswith(_BEGIN)), default=0)


def shortened(text: str) -> str:
    """As much of it as a headline takes."""
    return text if len(text) <= _LONGEST_HEADLINE else text[:_LONGEST_HEADLINE] + "…"


def is_noise(text: str) -> bool:
    """Whether a launcher's message means nothing to people."""
    return _NOISE.match(text) is not None


def readable(line: str) -> str:
    """A line of a job with its tags turned into ``rank 3: ``; the standard output of rank 0, which shows the progress, without."""
    return _TAG.sub(lambda tag: "" if tag["rank"] == "0" and tag["stream"] == "stdout" else f"rank {tag['rank']}: ", line)


def pieces(line: str) -> Iterator[tuple[str, str]]:
    """A line of a job split at its tags: (tag, what follows it). The tag is empty for what is before the first."""
    tag, begin = "", 0
    for found in _TAG.finditer(line):
        if tag or found.start():
            yield tag, line[begin : found.start()]
        tag, begin = found[0], found.end()
    yield tag, line[begin:]


def of_ranks(line: str, ranks: Collection[int]) -> str:
    """What these ranks wrote in a line of a job's log, as ``rank 3: …``; empty if it was none of them."""
    tagged = ((_TAG.match(tag), text) for tag, text in pieces(line))
    return "\n".join(f"rank {int(tag['rank'])}: {text}" for tag, text in tagged if tag and text and int(tag["rank"]) in ranks)


class RankOutput:
    """Takes a launcher's lines, one per call.

    Args:
        folder: where each rank's output is kept as ``rank.N/stdout`` and ``rank.N/stderr``, as horovodrun lays it out: N with leading
            zeros, so that names sort; None keeps none.
        quiet, timestamps: show rank 0 only; begin each line of a rank with the time.

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
        self._latest: dict[int, RankTraceback] = {}  # of each rank
        self._failures: list[RankTraceback] = []  # in the order in which they were whole
        self._last_words: dict[int, str] = {}  # the last line of standard error of each rank that is of no traceback
        self._box: list[str] = []  # a message of mpirun that has no end yet
        self._shown = 0  # lines

    def __call__(self, line: str) -> None:
        head, *parts = _TAG.split(line)
        if head.strip() or not parts:
            self._take_message(head)
        for at in range(0, len(parts), 3):
            rank, stream, text = int(parts[at]), parts[at + 1], parts[at + 2]
            self._partial[rank, stream] = self._partial.get((rank, stream), "") + text
            if at + 3 == len(parts):  # mpirun tags every write: a rank's line ends with the last of them
                self._take(rank, stream, self._partial.pop((rank, stream)))

    def _take_message(self, text: str) -> None:
        """Show the launcher's own, each of mpirun's boxes as soon as it is whole."""
        if text.startswith(_OWN):
            self.verdict = text[len(_OWN) :]
        is_rule = bool(_RULE.fullmatch(text.strip()))
        if self._box or is_rule:
            self._box.append(text)
            if (is_rule and len(self._box) > 1) or len(self._box) == _LONGEST_BOX:
                if not _SAID_ANYWAY.fullmatch(" ".join(" ".join(self._box[1:-1]).split())):
                    self._show_messages(self._box)
                self._box = []
        elif not is_noise(text):
            self._show_messages([text])

    def _show_messages(self, lines: list[str]) -> None:
        for line in lines:
            self._progress.line(line)
            self._shown += 1

    def _take(self, rank: int, stream: str, text: str) -> None:
        if self._folder is not None:
            self._file(self._folder / f"rank.{rank:0{self._digits}}" / stream).write(text + "\n")
        if stream == "stderr" and self._follow(rank, text):
            return
        # A progress bar goes back to the line's begin, and is not a message.
        if stream == "stderr" and text.strip() and "\r" not in text.rstrip("\r"):
            self._last_words[rank] = text.strip()
        self._release(rank)
        self._show(rank, stream, text)

    def _show(self, rank: int, stream: str, text: str) -> None:
        if not self._quiet or rank == 0:
            self._shown += 1
            when = f"{time.strftime('%a %b %d %H:%M:%S %Y')} " if self._timestamps else ""
            self._progress.output(stream, f"{when}[{rank}] ", text, _COLOURS[rank % len(_COLOURS)])

    def _file(self, path: Path) -> IO[str]:
        if path not in self._files:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._files[path] = path.open("w", encoding="utf-8", buffering=1)
        return self._files[path]

    def _follow(self, rank: int, text: str) -> bool:
        """Take a line of standard error; whether it is a traceback's, and so not to be shown now."""
        failure = self._latest.get(rank)
        if text.startswith(_BEGIN):
            if failure is None or not failure.goes_on:
                self._survived(rank)
                failure = self._latest[rank] = RankTraceback(rank)
            failure.is_whole = False
        elif failure is None:
            return False
        if len(failure.lines) == _MAX_LINES:  # it is not a traceback, or the rank has survived it
            self._survived(rank)
            return False
        failure.lines.append(text)
        if failure.is_whole:
            # More of a message is shown as it comes; a blank line may be that before a traceback that goes on from this one.
            is_held = failure.at is None and (not text or text.startswith(_LINKS))
            failure.shown += not is_held
            return is_held
        if text and not text.startswith((" ", _BEGIN)):
            self._complete(failure)
        return True

    def _survived(self, rank: int) -> None:
        """Forget its latest traceback, after it has been shown."""
        self._release(rank)
        failure = self._latest.pop(rank, None)
        if failure in self._failures:
            self._failures.remove(failure)
        elif failure is not None:
            self._show_lines(failure)

    def _complete(self, failure: RankTraceback) -> None:
        failure.is_whole = True
        if failure not in self._failures:
            self._failures.append(failure)
        before = self._failures[: self._failures.index(failure)]
        failure.twin = next(
            (other.rank for other in before if other.twin is None and other.rank != failure.rank and failure.is_like(other)), None
        )
        if failure.at is not None or (failure.twin is None and not failure.is_symptom):
            self._show_lines(failure)

    def _show_lines(self, failure: RankTraceback) -> None:
        for line in failure.lines[failure.shown :]:
            self._show(failure.rank, "stderr", line)
        failure.shown, failure.at = len(failure.lines), self._shown

    def _release(self, rank: int) -> None:
        """Show the one line of a rank's traceback that has been held back: the rank goes on."""
        failure = self._latest.get(rank)
        if failure is not None and failure.at is None and failure.is_whole:
            self._show(rank, "stderr", self._in_one_line(failure))
            failure.shown, failure.at = len(failure.lines), self._shown

    @staticmethod
    def _in_one_line(failure: RankTraceback) -> str:
        return failure.exception if failure.twin is None or failure.is_symptom else f"the same error as that of rank {failure.twin}"

    def first_failure(self, first: int | None = None, went_on: Collection[int] = ()) -> RankTraceback | None:
        """The first that is not about another rank's end, else that of ``first``, the rank that ended first.

        Where ``first`` is None it is the first of all, unless the launcher has named a rank. Ranks that ``went_on`` had survived what
        they have printed.
        """
        causes = [failure for failure in self._failures if not failure.is_symptom and failure.rank not in went_on]
        others = [] if self.verdict else self._failures
        return next(iter(causes or [each for each in others if first in (None, each.rank)]), None)

    def has_raised(self, rank: int) -> bool:
        """Whether its last words are a traceback."""
        return any(failure.rank == rank for failure in self._failures)

    def last_words(self, rank: int) -> str:
        """The last line that it wrote to standard error, unless that is a traceback."""
        return shortened(self._last_words.get(rank, ""))

    def accused(self) -> set[int]:
        """The ranks of whose end others tell."""
        return set().union(*(failure.accused for failure in self._failures))

    def has_symptoms(self) -> bool:
        """Whether a rank has told of another's end."""
        return any(failure.is_symptom for failure in self._failures)

    def is_on_screen(self, failure: RankTraceback) -> bool:
        """Whether the whole of it is among the last lines that were shown."""
        hidden = self._quiet and failure.rank != 0
        return (
            failure.at is not None
            and failure.twin is None
            and not failure.is_symptom
            and not hidden
            and self._shown - failure.at <= _RECENT
        )

    def consequences(self, cause: RankTraceback | None) -> list[str]:
        """What other ranks failed with and has not been shown: ``ranks 0 and 1: …``, a line for each error."""
        others = [failure for failure in self._failures if failure is not cause and failure.at is None]
        ranks = grouped((self._in_one_line(failure), failure.rank) for failure in others)
        return [
            f"{'ranks' if len(some) > 1 else 'rank'} {joined([str(rank) for rank in sorted(some)])}: {text}" for text, some in ranks.items()
        ]

    def close(self) -> None:
        """Show lines that have no end, and close the files."""
        for (rank, stream), text in self._partial.items():
            self._take(rank, stream, text)
        self._partial.clear()
        self._show_messages(self._box)
        self._box = []
        for failure in self._latest.values():
            if not failure.is_whole:  # the rank was killed while it printed it
                self._show_lines(failure)
        for file in self._files.values():
            file.close()
