"""`provision doctor --job …` on the command line: parse, call one function, print."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

import typer

from provision.base import paths, terminal
from provision.base.errors import UsageError
from provision.cli.options import Json, Limit, inventory_of, passwords, with_options
from provision.doctor.stall import examination, judgement
from provision.doctor.stall.model import Document
from provision.remote import progress
from provision.remote.session import RECORD, RUN_ID, Record, Session
from provision.report import runs

_STYLES = {"stalled": "bold red", "works": "bold yellow", "moves": "green"}
_MAX_GROUPS = 8  # of ranks that are shown
_TARGET = typer.Argument(
    metavar="PID|HOSTS|RUN",
    show_default=False,
    help="Ranks or launchers on this machine (`4711`, `4711,4712`), hosts with the newest job of this user, or a run as `provision status` "
    "names it. By default all jobs of this user on this machine.",
)


@with_options(passwords=passwords)
def job(
    target: Annotated[list[str] | None, _TARGET] = None, limit: Limit = None, json_: Json = False, *, passwords: Mapping[str, str]
) -> None:
    """Say which rank keeps a job waiting, at which line, and why. Changes nothing in the job. `provision doctor --job` is the same.

    The exit code is 0 where nothing is stalled, 1 for a stalled job, and 2 for wrong usage, or where no host could be examined.
    """
    words = ",".join(target or ())
    if not target or re.fullmatch(r"[0-9]{1,12}(,[0-9]{1,12})*,?", words):
        found = examination.of_processes([int(pid) for pid in re.findall(r"[0-9]+", words)] if target else None)
    else:
        run = words if RUN_ID.fullmatch(words) else None
        record = runs.load(paths.runs() / run / RECORD, Record) if run else None
        if run and record is None:
            raise UsageError(f"no such run here, or its {RECORD} is damaged: {run}", hint="name its hosts: provision doctor --job HOSTS")
        inventory = inventory_of(record.inventory if record else target, limit)
        with progress.make() as shown, Session(inventory, shown, passwords, command="provision doctor --job") as session:
            found = examination.of_hosts(session, run)
    code = 2 if found.failed and not found.jobs else int(any(each.state == "stalled" for each in found.jobs))
    if json_:
        terminal.print_json(found.model_dump(mode="json", by_alias=True))
    else:
        _print(found)
    if code:
        raise typer.Exit(code)


def _print(found: Document) -> None:
    console = terminal.out()
    for host, why in found.failed.items():
        terminal.err().say(f"{host}: not examined: {why}", "bold yellow")
    if not found.jobs and not found.failed:
        console.say("no job runs here: no process of this user has a launcher's RANK", hint="name a process: provision doctor --job PID")
    for verdict in found.jobs:
        console.prose(verdict.said, _STYLES[verdict.state])
        groups = sorted(judgement.grouped(verdict.places), key=lambda group: group[0].rank not in verdict.suspects)
        for group in groups[:_MAX_GROUPS]:
            console.say(f"\n{judgement.says(group)}", "cyan")
            for line in group[0].evidence:
                console.say(f"  {line}")
        if len(groups) > _MAX_GROUPS:
            console.say(f"\n… and {len(groups) - _MAX_GROUPS} more places: --json has all", "dim")
        for step in verdict.steps:
            console.say(f"→ {step}")
