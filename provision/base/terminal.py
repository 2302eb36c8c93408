"""The terminal: the only way by which anything is printed.

What we print holds text from outside: output and errors of hosts, facts, names, lines of logs. On a terminal such text could move the
cursor, write the clipboard, or pass for what we say ourselves. So control characters become visible here, and markup is plain text.
"""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import typer
from rich.ansi import AnsiDecoder
from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

__all__ = [
    "Console", "Live", "Padding", "Panel", "Table", "Text",
    "confirm", "document", "drawn", "err", "live", "neutral", "out", "say", "styled", "table",
]  # fmt: skip

_PIPE_WIDTH = 200  # of tables that go into a pipe or file: wide enough that hardly a line is folded
_INDENT = "    "  # before every line of a text but the first
# What begins with an escape character. A string (title, clipboard, link) lasts to its end or the next escape.
_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])?")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def neutral(text: str) -> str:
    r"""The text in one line, with what controls a terminal or the order of letters spelled out: ``\x1b``, ``\u202e``, ``\n``."""
    if text.isprintable():
        return text
    return "".join(letter if _harmless(letter) else letter.encode("unicode_escape").decode() for letter in text)


def _harmless(letter: str) -> bool:
    return letter.isprintable() or letter == "\t" or unicodedata.category(letter) == "Zs"


def _neutral_lines(text: str) -> str:
    return "\n".join(map(neutral, text.split("\n")))


def styled(text: str, style: str = "") -> Text:
    """The text, neutral, in a style: a part of a line, or a table's cell."""
    return Text(neutral(text), style=style)


class Console(RichConsole):
    """Standard output or standard error.

    Text is printed with `say`. Whatever else comes to be printed is neutral, too: it is made so where rich renders it.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def say(self, text: str, style: str = "", *, hint: str | None = None) -> None:
        """Print a text, and what to do about it.

        Lines are never folded, so that what a user copies stays whole. All but the first are indented: what begins a line is ours.
        """
        body = text.lstrip("\n")
        self.print(Text("\n" * (len(text) - len(body)) + _indented(body), style=style), soft_wrap=True)
        if hint:
            self.print(Text(f"  → {_indented(hint)}", style="bold"), soft_wrap=True)

    def program(self, text: str, style: str = "", *, tag: str = "") -> None:
        """Print a line of a program of the user's, behind a tag of ours: into a file or pipe as it is, on a terminal as `drawn`."""
        if self.file.isatty():
            self.print(Text(tag, style=style) + drawn(text, style), soft_wrap=True)
            return
        try:
            self.file.write(f"{tag}{text}\n")
            self.file.flush()
        except BrokenPipeError:  # nobody reads any more
            self.on_broken_pipe()

    def content(self, text: str) -> None:
        """Print what a file holds: into a file or pipe as it is, on a terminal neutral."""
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
    """Standard output, for results: as wide as the terminal; into a pipe hardly a line is folded."""
    return Console() if sys.stdout.isatty() else Console(width=_PIPE_WIDTH)


def err() -> Console:
    """Standard error, for what is said meanwhile."""
    return Console(stderr=True)


def say(text: str) -> None:
    """Print a text on standard error."""
    err().say(text)


def document(data: Any) -> None:
    """Print a document for programs on standard output. In JSON all that is not ASCII is escaped: harmless, and nothing is lost."""
    out().content(json.dumps(data, indent=2, default=str) + "\n")


def confirm(question: str) -> bool:
    """Ask, on standard error."""
    return typer.confirm(neutral(question), err=True)


def drawn(text: str, style: str = "") -> Text:
    """A program's line as a terminal would show it in the end: with its colours, without all else that controls a terminal, and of what
    a progress bar draws over itself the last state."""
    last = text.rstrip("\r").rpartition("\r")[2]
    coloured = _SEQUENCE.sub(lambda found: found[0] if _COLOUR.fullmatch(found[0]) else "", last)
    shown = AnsiDecoder().decode_line("".join(letter for letter in coloured if letter == "\x1b" or _harmless(letter)))
    shown.style = style
    return shown


def table(entries: Iterable[Mapping[str, str]], styles: Mapping[str, str] | None = None) -> Table:
    """A plain table; its columns are the keys of the first row. ``styles``: of what stands in the column ``state``."""
    listed = list(entries)
    built = Table(box=None, pad_edge=False, header_style="bold")
    for column in listed[0] if listed else ():
        built.add_column(styled(column), overflow="fold")
    for entry in listed:
        built.add_row(*(styled(value, (styles or {}).get(value, "") if column == "state" else "") for column, value in entry.items()))
    return built


def live(console: Console, draw: Callable[[], Table]) -> Live:
    """A view below what is printed, of what ``draw`` returns, again and again."""
    return Live(get_renderable=draw, console=console, refresh_per_second=8, transient=True)


def _indented(text: str) -> str:
    first, *rest = text.replace("\r\n", "\n").split("\n")
    return "\n".join([neutral(first), *(_INDENT + neutral(line) if line else "" for line in rest)])
