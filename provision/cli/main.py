"""The `provision` command: its commands, each imported when it is called, and how errors end it."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from itertools import takewhile
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from provision import __version__
from provision.base import terminal
from provision.base.errors import UsageError, as_provision_error
from provision.cli.help import App, Group, plain_errors, suggestion

if TYPE_CHECKING:
    from typer._click import Command as ClickCommand
    from typer._click import Context

_Result = TypeVar("_Result")
#: The help's groups of commands, in its order. The module of this name has each as `app` with commands of its own, else as a function.
_JOBS = ("jobs", "logs", "cancel", "fetch")
_GROUPS = {
    "Begin": ("init", "up", "survey", "plan", "run", "sandbox"),
    "Look": ("status", "doctor", *_JOBS, "certify", "bench", "runs", "ssh"),
    "More": ("push", "smoke", "image", "export", "bundle", "remove", "catalog", "schema"),
}
_GROUP_OF = {name: title for title, names in _GROUPS.items() for name in names}


class _Commands(Mapping[str, "ClickCommand"]):
    """Name → command, which is imported when it is looked up."""

    def __getitem__(self, name: str) -> ClickCommand:
        return _command(name)

    def __iter__(self) -> Iterator[str]:
        return iter(_GROUP_OF)

    def __len__(self) -> int:
        return len(_GROUP_OF)


@cache
def _command(name: str) -> ClickCommand:
    title = _GROUP_OF[name]
    module = import_module(f"provision.cli.{'jobs' if name in _JOBS else name}")
    group = getattr(module, "app", None)
    if group is None:
        group = App()
        group.command(**getattr(module, "COMMAND", {}))(getattr(module, name))
    command = typer.main.get_command(group)
    command.name, command.rich_help_panel = name, title  # type: ignore[attr-defined]
    return command


class _MainJobGroup(Group):
    """``provision HOSTS`` is ``provision up HOSTS`` where no command can be meant: it installs as root."""

    def __init__(self, **named: Any) -> None:
        super().__init__(**named)
        self.commands = _Commands()  # type: ignore[assignment]

    def invoke(self, ctx: Context) -> object:
        with plain_errors():
            return super().invoke(ctx)

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        at = next((number for number, word in enumerate(args) if not word.startswith("-")), len(args))
        word = args[at] if at < len(args) else ""
        if word and word not in self.commands:
            if not (word == "localhost" or set(word) & set(",/.[@:") or os.path.exists(word)):
                hint = f"{suggestion(word, self.commands, ctx)} (a host of this name: provision up {word})"
                raise UsageError(f"no such command '{word}'", hint=hint)
            args = [*args[:at], "up", *args[at:]]
        with plain_errors():
            return super().parse_args(ctx, args)


app = App(
    cls=_MainJobGroup,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    help="Turn a list of bare Linux hosts into a training cluster. `provision HOSTS` does everything: survey, plan, install, train.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,  # noqa: ARG001  main() acts on it
) -> None:
    if version:
        terminal.out().say(f"provision {__version__}")
        raise typer.Exit


def guarded(call: Callable[[], _Result], *, debug: bool) -> int:
    """Call a command and turn what it raises into a message and an exit code: 0 success, 1 something is wrong, 2 wrong usage or input,
    130 interrupted."""
    try:
        call()
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 1
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  an internal error, too, is one line for the user
        if debug:
            terminal.say(traceback.format_exc())
        failure = as_provision_error(error)
        for number, (text, hint) in enumerate(failure.parts()):
            terminal.err().say(text if number else f"provision: {text}", hint=hint)
        return failure.exit_code
    return 0


def main() -> None:
    """Entry point of the console script and of ``python -m provision``."""
    terminal.prepare_streams()
    debug = "--debug" in takewhile(lambda word: word.startswith("-"), sys.argv[1:])
    sys.exit(guarded(lambda: app(prog_name="provision"), debug=debug))
