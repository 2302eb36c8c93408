"""The help of commands: their options in panels by group, with every name whole.

typer's own panels set each kind of name in a column of its own, and cut names where the columns do not fit the terminal.
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


class _Command(TyperCommand):
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
    """Names on the left, one below the other where they do not fit; no word of them is wider than their column."""
    longest = max(len(word) for names, _ in records for word in names.split())
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(width=max(longest, min(_NAMES_WIDTH, max(len(names) for names, _ in records))))
    grid.add_column(ratio=1, overflow="fold")
    for names, said in records:
        shown = Text(names)
        shown.highlight_regex(r"(?<!\S)--?[\w-]+", "bold cyan")
        grid.add_row(shown, Text(said))
    return grid


class App(typer.Typer):
    """Commands with that help."""

    def command(self, *given: Any, **named: Any) -> Callable[[_Function], _Function]:
        return super().command(*given, cls=_Command, **named)
