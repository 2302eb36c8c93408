"""Output to the terminal; nothing is printed in any other way.

Output contains untrusted text: output and errors of hosts, facts, names, lines of logs. On a terminal such text could move the cursor,
write the clipboard, or pretend to be a message of provision. So control characters are escaped here, and markup is plain text.
"""

from __future__ import annotations

import io
import json
import os
import re
import sys
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import typer
from rich.ansi import AnsiDecoder
from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

__all__ = [
    "Console", "Group", "Live", "Padding", "Panel", "ProgressBar", "RenderableType", "Table", "Text",
    "clipped", "confirm", "err", "live", "neutral", "out", "print_json", "program_line", "say", "styled", "table", "wrapped",
]  # fmt: skip

_PIPE_WIDTH = 200  # of tables in a pipe or file: wide enough that few lines are folded
_NAME = 24  # columns: a host's or a job's name up to this is never folded
_INDENT = "    "  # before every line of a text but the first
# An escape sequence. A string (title, clipboard, link) lasts to its end or the next escape character.
_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])?")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def neutral(text: str) -> str:
    r"""The text in one line, with characters that control a terminal or the text direction escaped: ``\x1b``, ``\u202e``, ``\n``."""
    if text.isprintable():
        return text
    return "".join(letter if _harmless(letter) else letter.encode("unicode_escape").decode() for letter in text)


def _harmless(letter: str) -> bool:
    return letter.isprintable() or letter == "\t" or unicodedata.category(letter) == "Zs"


def _neutral_lines(text: str) -> str:
    return "\n".join(map(neutral, text.split("\n")))


def styled(text: str, style: str = "") -> Text:
    """The text, escaped, in a style: part of a line, or a cell of a table."""
    return Text(neutral(text), style=style)


class Console(RichConsole):
    """Standard output or standard error.

    Text is printed with `say`. Everything else is escaped, too, where rich renders it.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def say(self, text: str, style: str = "", *, hint: str | None = None) -> None:
        """Print a text and a hint.

        Lines are never folded, so that they can be copied whole. All but the first are indented: untrusted text never begins a line.
        """
        body = text.lstrip("\n")
        self.print(Text("\n" * (len(text) - len(body)) + _indented(body), style=style), soft_wrap=True)
        if hint:
            self.print(Text(f"  → {_indented(hint)}", style="bold"), soft_wrap=True)

    def prose(self, text: str, style: str = "") -> None:
        """Print sentences, which are not pasted: as `say`, but the lines of a terminal end between words, indented like the first."""
        if not self.is_terminal:
            self.say(text, style)
            return
        body = text.lstrip("\n")
        indent = " " * (len(body) - len(body.lstrip(" ")))
        further = indent or "  "  # untrusted text never begins a line
        room = self.width - len(further)
        first, *rest = [part.rstrip() for line in body.lstrip(" ").split("\n") for part in wrapped(line, room)]
        lines = [indent + first, *(further + part for part in rest)]
        self.print(Text("\n" * (len(text) - len(body)) + "\n".join(lines), style=style), soft_wrap=True)

    def program(self, text: str, style: str = "", *, tag: str = "") -> None:
        """Print a line of a user's program, after a tag: unchanged into a file or pipe, as `program_line` on a terminal."""
        if self.file.isatty():
            self.print(Text(tag, style=style) + program_line(text, style), soft_wrap=True)
            return
        try:
            self.file.write(f"{tag}{text}\n")
            self.file.flush()
        except BrokenPipeError:  # the reader has ended
            self.on_broken_pipe()

    def content(self, text: str) -> None:
        """Print the content of a file: unchanged into a file or pipe, escaped on a terminal."""
        self.file.write(_neutral_lines(text) if self.file.isatty() else text)
        self.file.flush()

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:  # rich's own, which moves the cursor of a live view
                yield segment
            else:
                yield Segment(_neutral_lines(segment.text), segment.style and segment.style.update_link(None))

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(neutral(text), **options)


def out() -> Console:
    """Standard output, for results: as wide as the terminal, or so wide that few lines are folded."""
    return Console() if sys.stdout.isatty() else Console(width=_PIPE_WIDTH)


def err() -> Console:
    """Standard error, for messages."""
    return Console(stderr=True)


def prepare_streams() -> None:
    """Let every text be written: what the streams' encoding lacks is escaped, and a stream that the shell has closed is the null device."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  open until the end
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say(text: str) -> None:
    """Print a text on standard error."""
    err().say(text)


def print_json(data: object) -> None:
    """Print a document for programs on standard output. JSON escapes all that is not ASCII: harmless, and nothing is lost."""
    out().content(json.dumps(data, indent=2, default=str) + "\n")


def confirm(question: str) -> bool:
    """Ask a yes-or-no question on standard error."""
    return typer.confirm(neutral(question), err=True)


def ask(question: str, default: str | None = None) -> str:
    """Ask for a line on standard error. Without a default an empty one is asked for again."""
    return str(typer.prompt(neutral(question), default=default, show_default=False, err=True)).strip()


def program_line(text: str, style: str = "") -> Text:
    """A program's line as a terminal would finally show it: with its colours, without other control sequences, and with the last state of
    a progress bar that redraws itself."""
    last = text.rstrip("\r").rpartition("\r")[2]
    coloured = _SEQUENCE.sub(lambda found: found[0] if _COLOUR.fullmatch(found[0]) else "", last)
    shown = AnsiDecoder().decode_line("".join(letter for letter in coloured if letter == "\x1b" or _harmless(letter)))
    shown.style = style
    return shown


def table(entries: Iterable[Mapping[str, str]], styles: Mapping[str, str] | None = None) -> Table:
    """A plain table; its columns are the keys of the first row. ``styles``: of the values in the column ``state``."""
    listed = list(entries)
    built = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(listed[0] if listed else ()):
        is_name = number == 0 and max(len(entry[column]) for entry in listed) <= _NAME  # is pasted
        built.add_column(styled(column), overflow="fold", no_wrap=is_name)
    for entry in listed:
        built.add_row(*(styled(value, (styles or {}).get(value, "") if column == "state" else "") for column, value in entry.items()))
    return built


def wrapped(text: str, width: int) -> list[str]:
    """The lines that a text takes in so many columns."""
    return [line.plain for line in Text(neutral(text)).wrap(_plain(), max(1, width), overflow="fold")]


def clipped(text: str, width: int, lines: int) -> str:
    """The text, cut where it would take more than so many lines."""
    length = width * lines
    if len(text) <= length and len(wrapped(text, width)) <= lines:
        return text
    while length > 0 and len(wrapped(f"{text[:length]} …", width)) > lines:
        length -= 1
    return f"{text[:length]} …"


@cache
def _plain() -> RichConsole:
    return RichConsole()


def live(console: Console, draw: Callable[[], RenderableType]) -> Live:
    """A view below the output that shows what ``draw`` returns, refreshed continuously."""
    return Live(get_renderable=draw, console=console, refresh_per_second=4, transient=True)


def _indented(text: str) -> str:
    first, *rest = text.replace("\r\n", "\n").split("\n")
    return "\n".join([neutral(first), *(_INDENT + neutral(line) if line else "" for line in rest)])
