"""Help of commands: their options in panels by group, with no name cut.

typer's own panels have a column for each kind of name, and cut names where the columns do not fit the terminal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand

from provision.base import terminal
from provision.base.terminal import Padding, Panel, Table, Text

_Function = TypeVar("_Function", bound=Callable[..., Any])
_NAMES_WIDTH = 28  # columns that names and placeholders get, unless a single one is longer


class Command(TyperCommand):
    """A command with this help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002  it would have neither panels nor colours
        console = terminal.Console()
        text = "\n\n".join(" ".join(part.split()) for part in (self.help or "").split("\n\n"))
        console.print(Padding(Text(self.get_usage(ctx), style="bold"), 1), Padding(Text(text), (0, 1, 1, 1)))
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)  # None: it is hidden
            if record is not None:
                usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
                panels.setdefault(getattr(parameter, "rich_help_panel", None) or usual, []).append(record)
        for title in sorted(panels, key=lambda title: title != "Arguments"):
            console.print(Panel(_rows(panels[title]), title=title, title_align="left", border_style="dim"))


def _rows(records: list[tuple[str, str]]) -> Table:
    """Names on the left, wrapped where they do not fit; the column is as wide as the longest word."""
    longest = max(len(word) for names, _ in records for word in names.split())
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(width=max(longest, min(_NAMES_WIDTH, max(len(names) for names, _ in records))))
    grid.add_column(ratio=1, overflow="fold")
    for names, description in records:
        shown = Text(names)
        shown.highlight_regex(r"(?<!\S)--?[\w-]+", "bold cyan")
        grid.add_row(shown, Text(description))
    return grid


class App(typer.Typer):
    """A typer app whose commands have this help."""

    def command(self, *arguments: Any, **named: Any) -> Callable[[_Function], _Function]:
        return super().command(*arguments, **{"cls": Command, **named})
