"""`provision doctor …` on the command line: parse, call one function, print."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from provision.doctor import logs, show, signatures
from provision.doctor.findings import Finding, document


class _LookByDefault(TyperGroup):
    """``provision doctor [HOSTS] [--log FILE]`` is ``provision doctor look …``: what is no command belongs to the look."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ("-h", "--help")):
            args = ["look", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_LookByDefault,
    help="Names known errors, on hosts and in logs, and says how to mend them: `provision doctor [HOSTS] [--log FILE]`.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
Json = Annotated[bool, typer.Option("--json", help="One JSON document on standard output and nothing else there.")]


@app.command(hidden=True)
def look(
    log: Annotated[list[str] | None, typer.Option("--log", help="A log to read, `-` for standard input; may be given again.")] = None,
    json_: Json = False,
) -> None:
    """Explain logs."""
    found = logs.read(log or ["-"])
    _print(found, json_, looked_at=_named(log or ["-"]))


@app.command()
def explain(identifier: Annotated[str, typer.Argument(metavar="ID", help="As `provision doctor list` names it.")]) -> None:
    """Print all that is known of one error."""
    signature = signatures.named(identifier)
    show.entry(signature, _console(), live=False)


@app.command("list")
def list_() -> None:
    """Print the known errors, by layer."""
    show.catalogue(_console())


def _print(found: list[Finding], as_json: bool, *, looked_at: str) -> None:
    if as_json:
        typer.echo(json.dumps(document(found), indent=2, ensure_ascii=False))
    else:
        show.findings(found, _console(), looked_at=looked_at)
    if found:
        raise typer.Exit(1)


def _named(names: list[str]) -> str:
    shown = ["standard input" if name == "-" else name for name in names]
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")


def _console() -> Console:
    """As wide as the terminal; into a pipe, no line is folded."""
    return Console() if sys.stdout.isatty() else Console(width=200)
