"""The output of a build: every line into the log, every step shown, and the last lines of each step for an error."""

from __future__ import annotations

import re
import time
from collections import deque
from typing import IO

from provision.base import aptsources
from provision.remote.progress import Progress

#: BuildKit's plain progress: the step's number, the seconds of what a program of it prints, and the text.
_LINE = re.compile(r"#(\d+) (\d+\.\d+(?: |$))?(.*)")
_MOUNT = re.compile(r"--mount=\S+ +")
_TAIL = 20
_LONGEST = 160  # characters of a step's command that are shown
_QUIET_S = 15.0  # how often a long step shows what it prints


class BuildOutput:
    """The output of one build.

    Attributes:
        step: the step that printed last, such as ``[system 2/2] RUN apt-get update …``; empty before the first.
        failed: the step that failed; empty without one.
    """

    def __init__(self, log: IO[str], progress: Progress) -> None:
        self._log, self._progress = log, progress
        self._names: dict[str, str] = {}
        self._tails: dict[str, deque[str]] = {}
        self._printed = time.monotonic()
        self.step = self.failed = ""

    def doing(self, text: str) -> None:
        """Print what is done here before the build, until something else is."""
        self._write(text)
        self._progress.doing(text)

    def note(self, line: str) -> None:
        """Take one line of what the build prints."""
        line = aptsources.without_logins(line)  # apt may print the mirror's
        self._write(line)
        found = _LINE.fullmatch(line)
        if found is None or found[3] in ("", "..."):
            return
        number, printed, text = found[1], found[2] is not None, found[3]
        if number not in self._names:
            text = _MOUNT.sub("", text)
            self._names[number], self._tails[number] = text, deque(maxlen=_TAIL)
            if text.startswith("[") and not text.startswith("[internal]"):
                self._show(text)
        elif printed:
            self._tails[number].append(text)
        elif text.startswith("ERROR: "):
            self.failed = self._names[number]
            if not self._tails[number]:
                self._tails[number].append(text)
        self.step = self._names[number]
        if time.monotonic() - self._printed > _QUIET_S:
            self._show(f"  … {text}")

    def tail(self, step: str) -> list[str]:
        """The last lines that a step printed."""
        return next((list(self._tails[number]) for number, name in self._names.items() if name == step), [])

    def _write(self, line: str) -> None:
        self._log.write(f"{line}\n")
        self._log.flush()

    def _show(self, text: str) -> None:
        self._printed = time.monotonic()
        self._progress.doing(text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…")
