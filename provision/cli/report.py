"""`provision runs`, `provision report` and `provision logs` on the command line: parse, call one function, print."""

from __future__ import annotations

from itertools import islice
from typing import Annotated

import typer

from provision.base import terminal
from provision.cli.options import Json
from provision.report import runs as folders

_GOOD, _BAD = ("ready", "done"), ("not ready", "failed", "killed", "unreadable")
_STYLE = {**dict.fromkeys(_GOOD, "green"), **dict.fromkeys(_BAD, "red"), "running": "cyan"}


def runs(
    most: Annotated[int, typer.Option("-n", "--most", min=1, help="How many, the newest first.")] = 20,
    json_: Json = False,
) -> None:
    """List the runs of this machine, the newest first: when, which command, on which hosts, and how it ended."""
    found = list(islice(folders.runs(), most))
    if json_:
        terminal.print_json({"schema": 1, "runs": [run.as_dict() for run in found]})
        return
    console = terminal.out()
    if not found:
        console.say("no run yet: provision HOSTS makes one")
        return
    console.print(
        terminal.table(
            (
                {
                    "run": run.id,
                    "state": run.verdict,
                    "command": run.command or "-",
                    "time": f"{run.seconds:.0f} s" if run.seconds is not None else "-",
                    "hosts": run.inventory or "-",
                }
                for run in found
            ),
            _STYLE,
        )
    )
    console.say("one of them: provision report RUN, provision logs HOST --run RUN")
