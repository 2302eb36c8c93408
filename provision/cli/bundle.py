"""`provision bundle` on the command line: parse, call one function, print."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from provision.base import terminal
from provision.base.errors import UsageError
from provision.cli.options import Hosts, Limit, inventory_of, passwords, plan_options, with_options
from provision.commands.bundle import write_bundle
from provision.plan.options import Options
from provision.remote import progress
from provision.report import model


@with_options(options=plan_options("cpu", "apt_mirror"), passwords=passwords)
def bundle(
    hosts: Hosts,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The bundle to write.", dir_okay=False)],
    limit: Limit = None,
    *,
    options: Options,
    passwords: Mapping[str, str],
) -> None:
    """Write everything that the plan needs into one file, for hosts without a network: wheels, packages, data, with checksums."""
    inventory = inventory_of(hosts, limit)
    if not out.absolute().parent.is_dir():
        raise UsageError(f"--out {out}: no such folder")
    with progress.make() as shown:
        survey = write_bundle(inventory, options, out.absolute(), shown, passwords)
    model.show_problems(survey.problems, terminal.err())
    if survey.blocked:
        raise typer.Exit(1)
    terminal.out().say(f"{out}: {out.stat().st_size / 1e6:.0f} MB; install from it: provision {inventory.argument} --bundle {out}")
