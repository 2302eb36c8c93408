"""`provision remove` on the command line: parse, call one function, print."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated

import typer

from provision.base import terminal
from provision.base.errors import UsageError
from provision.cli.options import Hosts, Json, Limit, inventory_of, passwords, with_options
from provision.commands.remove import remove_installations
from provision.install import removal
from provision.remote import progress
from provision.report import model


@with_options(passwords=passwords)
def remove(
    hosts: Hosts,
    limit: Limit = None,
    check: Annotated[bool, typer.Option("--check", help="Change nothing; show what would be removed.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    json_: Json = False,
    *,
    passwords: Mapping[str, str],
) -> None:
    """Remove exactly what `provision up` installed on the hosts: packages, files, keys and folders."""
    inventory = inventory_of(hosts, limit)
    if not (yes or check or sys.stdin.isatty()):
        raise UsageError("no terminal to ask for confirmation on", hint="confirm with --yes, or see what would be removed: --check")

    def confirmed(found: list[removal.HostRemoval]) -> bool:
        if check or yes:
            return not check
        model.show_removals(found, terminal.err())
        return terminal.confirm("Remove all of this?")

    with progress.make() as shown:
        found = remove_installations(inventory, shown, passwords, confirmed)
    if json_:
        terminal.print_json(removal.as_dict(found))
    else:
        model.show_removals(found, terminal.out())
    if any(one.bad for one in found):
        raise typer.Exit(1)
