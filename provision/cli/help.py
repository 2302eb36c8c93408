"""Help of commands: their options in panels by group, with no name cut; and wrong usage as errors like all others.

typer's own panels have a column for each kind of name, and cut names where the columns do not fit the terminal. Its errors are boxes, too.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from provision.base import terminal
from provision.base.errors import UsageError
from provision.base.panels import ADVANCED, FoldedPanel
from provision.base.terminal import Padding, Panel, Table, Text

if TYPE_CHECKING:  # typer's copy of click; an earlier typer has click itself
    from typer._click import Command as ClickCommand
    from typer._click import Context, HelpFormatter

_Function = TypeVar("_Function", bound=Callable[..., Any])
#: typer has click's errors, from click itself or from a copy of its own.
_ClickUsageError: type[Any] = typer.BadParameter.__mro__[1]
_ALIKE = 0.7  # of commands and options
_NAME = r"(?<!\S)--?[\w-]+"  # of an option
#: What people type who know other tools, and what it is here.
_COMMANDS_MEANT = {
    **dict.fromkeys(("install", "setup", "deploy", "apply", "create"), "provision up"),
    **dict.fromkeys(("uninstall", "destroy", "clean"), "provision remove"),
    **dict.fromkeys(("check", "diagnose", "health", "validate"), "provision doctor"),
    **dict.fromkeys(("train", "launch", "exec"), "provision run"),
    **dict.fromkeys(("facts", "discover", "inventory"), "provision survey"),
    **dict.fromkeys(("history", "list", "ls"), "provision runs"),
    "report": "provision runs report",
    "ps": "provision jobs",
    **dict.fromkeys(("build", "docker"), "provision image build"),
    **dict.fromkeys(("benchmark", "perf"), "provision bench"),
    "test": "provision smoke",
    "version": "provision --version",
    "help": "provision --help",
}
_OPTIONS_MEANT = {
    **dict.fromkeys(("--dry-run", "--diff", "--noop"), ("--check",)),
    **dict.fromkeys(("--hosts-file", "--inventory", "--inventory-file", "--hosts", "-i", "-H"), ("--hosts", "hosts")),
    **dict.fromkeys(("--force", "--reinstall"), ("--full",)),
}
_NAMES_WIDTH = 28  # columns that names and placeholders get, unless a single one is longer
_NARROW, _FRAME = 14, 6  # columns: fewer are too few for texts; of a panel's frame and the gap


class Command(TyperCommand):
    """A command with this help."""

    def format_help(self, ctx: Context, formatter: HelpFormatter) -> None:  # noqa: ARG002  it would have neither panels nor colours
        _show(self, ctx)


class Group(TyperGroup):
    """A command that has commands, with this help."""

    def format_help(self, ctx: Context, formatter: HelpFormatter) -> None:  # noqa: ARG002  as above
        _show(self, ctx)
        shown = [(name, each) for name, each in self.commands.items() if not each.hidden]
        panels: dict[str, list[tuple[str, str]]] = {}
        for name, each in shown:
            title = getattr(each, "rich_help_panel", None) or "Commands"
            panels.setdefault(title, []).append((name, _sentences(each.help).partition("\n\n")[0]))
        for title, records in panels.items():
            _panel(title, records, r"^\S+")

    def resolve_command(self, ctx: Context, args: list[str]) -> tuple[str | None, ClickCommand | None, list[str]]:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            raise UsageError(f"no such command '{name}'", hint=suggestion(name, self.commands, ctx))
        return super().resolve_command(ctx, args)


@contextmanager
def plain_errors() -> Iterator[None]:
    """Raise UsageError for wrong usage that typer finds: a missing or unknown command, argument or option, or a wrong value."""
    try:
        yield
    except _ClickUsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # its text is the help
            raise
        raise _as_usage_error(error) from error


def _as_usage_error(error: Any) -> UsageError:
    known = getattr(error, "possibilities", None) or ()  # of an option that does not exist
    what = str(error.message if known else error.format_message())  # the latter names them, too
    name = getattr(error, "option_name", "")
    hint = "it stands before the command: provision --debug …" if name == "--debug" else suggestion(name, known, error.ctx)
    return UsageError(what[:1].lower() + what[1:].rstrip(".").replace("Input should be", "expected"), hint=hint)


def suggestion(word: str, known: Iterable[str], context: Context | None) -> str | None:
    """What may have been meant, else where to look."""
    here = [name for each in (context.command.params if context else ()) for name in (each.name, *each.opts)]
    if word in _COMMANDS_MEANT and context is not None and context.parent is None:
        return f"did you mean {_COMMANDS_MEANT[word]}?"
    if (meant := next((name for name in _OPTIONS_MEANT.get(word, ()) if name in here), "")) != "":
        return "did you mean HOSTS, without an option before it?" if meant == "hosts" else f"did you mean {meant}?"
    close = difflib.get_close_matches(word, known, n=3, cutoff=_ALIKE)
    return f"did you mean {' or '.join(close)}?" if close else f"see {context.command_path} --help" if context is not None else None


def _show(command: ClickCommand, ctx: Context) -> None:
    """Print usage, text, arguments and options."""
    terminal.Console().print(Padding(Text(command.get_usage(ctx), style="bold"), 1), Padding(Text(_sentences(command.help)), (0, 1, 1, 1)))
    panels: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)  # None: it is hidden
        if record is not None:
            usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
            names, text = record
            names = names.replace(" <list[str]>", "...") if usual == "Arguments" else names
            panels.setdefault(getattr(parameter, "rich_help_panel", None) or usual, []).append((names, text))
    folded = [title for title in panels if isinstance(title, FoldedPanel) and title.home != command.name]
    for title in sorted(panels.keys() - folded, key=lambda title: (title != "Arguments", title == ADVANCED, list(panels).index(title))):
        _panel(title, panels[title])
    if folded:
        _panel("More options", [(title, f"{', '.join(_names(panels[title]))} ({title.see})") for title in folded], r"$^")


def _names(records: Iterable[tuple[str, str]]) -> list[str]:
    return [name for names, _ in records for name in re.findall(_NAME, names)]


def _sentences(text: str | None) -> str:
    return "\n\n".join(" ".join(part.split()) for part in (text or "").split("\n\n"))


def _panel(title: str, records: list[tuple[str, str]], names: str = _NAME) -> None:
    """Print a panel. ``names``: a pattern of what is a name there."""
    terminal.Console().print(Panel(_rows(records, names), title=title, title_align="left", border_style="dim"))


def _rows(records: list[tuple[str, str]], pattern: str) -> Table:
    """Names on the left, wrapped where they do not fit; the column is as wide as the longest word. Above the texts in a narrow terminal."""
    longest = max(len(word) for names, _ in records for word in names.split())
    width = max(longest, min(_NAMES_WIDTH, max(len(names) for names, _ in records)))
    is_narrow = terminal.Console().width - width - _FRAME < max(len(word) for _, text in records for word in (*text.split(), " " * _NARROW))
    grid = Table.grid(padding=(0, 2), expand=True)
    if not is_narrow:
        grid.add_column(width=width)
    grid.add_column(ratio=1, overflow="fold")
    for names, description in records:
        shown = Text(names)
        shown.highlight_regex(pattern, "bold cyan")
        for cells in ((shown,), (Padding(Text(description), (0, 0, 0, 2)),)) if is_narrow else ((shown, Text(description)),):
            grid.add_row(*cells)
    return grid


class App(typer.Typer):
    """A typer app which has this help, as its commands have."""

    def __init__(self, **named: Any) -> None:
        super().__init__(**{"cls": Group, "add_completion": False, **named})

    def command(self, *arguments: Any, **named: Any) -> Callable[[_Function], _Function]:
        return super().command(*arguments, **{"cls": Command, **named})
