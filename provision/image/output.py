"""The output of a build: every line into the log, every step to the terminal, and the last lines of each step for an error."""

from __future__ import annotations

import os
import re
import time
from collections import deque
from typing import IO

from provision.base import aptsources
from provision.base.terminal import Console, Table, err, live, styled

#: BuildKit's plain progress: the step's number, the seconds of what a program of it prints, and the text.
_LINE = re.compile(r"#(\d+) (\d+\.\d+(?: |$))?(.*)")
_MOUNT = re.compile(r"--mount=\S+ +")
_TAIL = 20
_QUIET_S = 30.0  # without a terminal: how often a long step shows what it prints


class BuildOutput:
    """The output of one build; a context manager.

    Attributes:
        step: the step that printed last, such as ``[system 2/2] RUN apt-get update …``; empty before the first.
        failed: the step that failed; empty without one.
    """

    def __init__(self, log: IO[str], console: Console | None = None) -> None:
        self._log, self._console = log, console or err()
        self._names: dict[str, str] = {}
        self._tails: dict[str, deque[str]] = {}
        self._last = ""
        self._began = self._shown = time.monotonic()
        self.step = self.failed = ""
        shows = self._console.is_terminal and os.environ.get("TERM", "") != "dumb"
        self._live = live(self._console, self._table) if shows else None

    def __enter__(self) -> BuildOutput:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def remark(self, text: str) -> None:
        """Print a line of our own."""
        self._write(text)
        self._print(text)

    def note(self, line: str) -> None:
        """Take one line of what the build prints."""
        line = aptsources.without_logins(line)  # apt may print the mirror's
        self._write(line)
        found = _LINE.fullmatch(line)
        if found is None or not found[3]:
            return
        number, printed, text = found[1], found[2] is not None, found[3]
        if number not in self._names:
            text = _MOUNT.sub("", text)
            self._names[number], self._tails[number] = text, deque(maxlen=_TAIL)
            if text.startswith("[") and not text.startswith("[internal]"):
                self._print(_short(text, self._console.width))
        elif printed:
            self._tails[number].append(text)
        elif text.startswith("ERROR: "):
            self.failed = self._names[number]
            if not self._tails[number]:
                self._tails[number].append(text)
        if self.step != self._names[number]:
            self.step, self._began = self._names[number], time.monotonic()
        self._last = text
        if self._live is None and time.monotonic() - self._shown > _QUIET_S:
            self._print(_short(f"  … {text}", self._console.width))

    def tail(self, step: str) -> list[str]:
        """The last lines that a step printed."""
        return next((list(self._tails[number]) for number, name in self._names.items() if name == step), [])

    def _write(self, line: str) -> None:
        self._log.write(f"{line}\n")
        self._log.flush()

    def _print(self, text: str) -> None:
        self._shown = time.monotonic()
        (self._live.console if self._live else self._console).print(styled(text), soft_wrap=True)

    def _table(self) -> Table:
        table = Table.grid()
        width = self._console.width
        if self.step:
            table.add_row(styled(_short(f"{time.monotonic() - self._began:.0f} s  {self.step}", width), "bold"))
            table.add_row(styled(_short(f"  {self._last}", width), "dim"))
        return table


def _short(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
