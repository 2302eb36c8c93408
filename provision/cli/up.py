"""`provision up` on the command line: parse, call one function, print."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from provision.base import terminal
from provision.base.errors import UsageError
from provision.cli.options import Hosts, Json, Limit, inventory_of, passwords, plan_options, with_options
from provision.commands.up import make_ready
from provision.install import roles
from provision.plan.options import DATA, Options, SmokeOptions
from provision.remote import progress
from provision.report import model


def _smoke(
    smoke: Annotated[bool, typer.Option("--smoke/--no-smoke", show_default=False, help="End with the training job (default).")] = True,
    data: Annotated[Path | None, DATA] = None,
) -> SmokeOptions | None:
    if not smoke and data:
        terminal.say("--data has no effect: it is for the training job, which --no-smoke leaves out")
    return SmokeOptions(data=data) if smoke else None


_FIELDS = ("cpu", "driver", "env", "bundle", "apt_mirror", "check", "full", "first_step")


@with_options(options=plan_options(*_FIELDS), smoke=_smoke, passwords=passwords)
def up(
    hosts: Hosts, limit: Limit = None, json_: Json = False, *, options: Options, smoke: SmokeOptions | None, passwords: Mapping[str, str]
) -> None:
    """Survey the hosts, plan, install, and verify it with a training job over all of them."""
    roles.steps(options.first_step)  # an unknown step is an error before anything is done
    if options.driver and (options.bundle or options.first_step):
        other = "--bundle" if options.bundle else "--from"
        raise UsageError(f"--driver and {other} exclude each other", hint="install the driver in a run of its own")
    inventory = inventory_of(hosts, limit)

    def downgrade(lines: list[str]) -> bool:
        for line in lines:
            terminal.say(line)
        return options.check or (sys.stdin.isatty() and terminal.confirm("Replace newer packages by older ones?"))

    with progress.make() as shown:
        result = make_ready(inventory, replace(options, smoke=smoke), shown, passwords, downgrade)
    print_report(result, json_, model.commands_after(result, inventory.argument, sys.argv[1:], limit=limit, check=options.check))


def print_report(result: model.Report, as_json: bool, following: Sequence[str]) -> None:
    """Print what a run did, for people or as JSON. Raises Exit where something is wrong."""
    if as_json:
        terminal.print_json(result.as_dict())
    else:
        model.show(result, terminal.out(), following)
    if not result.ok:
        raise typer.Exit(1)
