"""`provision survey` on the command line: parse, call one function, print."""

from __future__ import annotations

from collections.abc import Mapping

import typer

from provision.base import terminal
from provision.cli.options import Hosts, Json, Limit, inventory_of, passwords, with_options
from provision.inventory import Inventory
from provision.remote import progress
from provision.remote.session import Session
from provision.report import model
from provision.survey import collect


@with_options(passwords=passwords)
def survey(hosts: Hosts, limit: Limit = None, json_: Json = False, *, passwords: Mapping[str, str]) -> None:
    """Show what every host is, what is installed on it, and what would prevent an installation. Changes nothing."""
    found = surveyed(inventory_of(hosts, limit), passwords, "provision survey", as_json=json_, tries_networks=True)
    if found.blocked:
        raise typer.Exit(1)


def surveyed(
    inventory: Inventory, passwords: Mapping[str, str], command: str, *, as_json: bool = False, tries_networks: bool = False
) -> collect.Survey:
    """A survey as a run of its own, after it has been printed."""
    with progress.make() as shown, Session(inventory, shown, passwords, command=command) as session:
        found = collect.survey_hosts(session, tries_networks=tries_networks)
        session.record.exit_code = 1 if found.blocked else 0
    if as_json:
        terminal.print_json(found.as_dict())
    else:
        if found.hosts:
            terminal.out().print(terminal.table(collect.summary(found.hosts)))
        model.show_problems(found.problems, terminal.out())
    return found
