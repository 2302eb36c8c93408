"""`provision survey` on the command line: parse, call one function, print."""

from __future__ import annotations

from collections.abc import Mapping

import typer

from provision.base import terminal
from provision.cli.options import Hosts, Json, Limit, inventory_of, passwords, with_options
from provision.remote import progress
from provision.remote.session import Session
from provision.report import model
from provision.survey import collect


@with_options(passwords=passwords)
def survey(hosts: Hosts, limit: Limit = None, json_: Json = False, *, passwords: Mapping[str, str]) -> None:
    """Show what every host is, what is installed on it, and what would prevent an installation. Changes nothing."""
    inventory = inventory_of(hosts, limit)
    with progress.make() as shown, Session(inventory, shown, passwords, command="provision survey") as session:
        found = collect.survey_hosts(session, tries_networks=True)
        session.record.exit_code = 1 if found.blocked else 0
    if json_:
        terminal.print_json(found.as_dict())
    else:
        console = terminal.out()
        if found.hosts:
            console.print(terminal.table(collect.summary(found.hosts)))
        model.show_problems(found.problems, console)
    if found.blocked:
        raise typer.Exit(1)
