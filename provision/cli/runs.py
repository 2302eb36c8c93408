"""`provision runs …` on the command line: parse, call one function, print."""

from __future__ import annotations

import webbrowser
from itertools import islice
from typing import Annotated

import typer

from provision.base import terminal
from provision.base.errors import ProvisionError, UsageError
from provision.base.text import duration
from provision.base.validation import MAX_COUNT
from provision.cli.help import App
from provision.cli.options import Json
from provision.report import page
from provision.report.runs import BAD, GOOD, REPORT, every, find

_STYLE: dict[str, str] = {**dict.fromkeys(GOOD, "green"), **dict.fromkeys(BAD, "red"), "running": "cyan"}

_RUN = "Id of a run, or how it begins; `provision runs` lists them."

app = App(invoke_without_command=True)


@app.callback()
def runs(
    context: typer.Context,
    most: Annotated[int, typer.Option("-n", "--most", min=1, max=MAX_COUNT, help="How many, the newest first.")] = 20,
    json_: Json = False,
) -> None:
    """List the runs of this machine, the newest first, and how each ended; `runs report`: a page of one; `logs HOST`: what one did."""
    if context.invoked_subcommand is not None:
        if json_:
            raise UsageError(f"--json: not of `provision runs {context.invoked_subcommand}`", hint="report.json is in the run's folder")
        return
    found = list(islice(every(), most))
    if json_:
        terminal.print_json({"schema": 1, "runs": [run.as_dict() for run in found]})
        return
    console = terminal.out()
    if not found:
        console.say("no run yet: provision HOSTS makes one")
        return
    rows = (
        {
            "run": run.id,
            "state": run.verdict,
            "command": run.command or "-",
            "time": duration(run.seconds) if run.seconds is not None else "-",
            "hosts": run.inventory or "-",
        }
        for run in found
    )
    console.print(terminal.table(rows, _STYLE))
    console.say("one of them: provision runs report RUN, provision logs HOST RUN")


@app.command()
def report(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", show_default=False, help=f"{_RUN} By default the newest one with a report.")
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Write a run as a page, report.html in its folder, and print where it is. `up` and `smoke` write it when they end, too."""
    found = find(run, (REPORT,))
    try:
        written = page.write(found.folder)
    except OSError as error:
        raise ProvisionError(f"the page cannot be written: {error.strerror}", where=str(found.folder / page.NAME)) from error
    terminal.out().say(str(written))
    if open_ and not webbrowser.open(written.as_uri()):
        raise ProvisionError("no browser was found on this machine", hint=f"open it by hand: {written}")
