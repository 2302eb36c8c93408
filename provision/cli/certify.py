"""`provision certify` on the command line: parse, call one function, print."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from provision.base import pages, terminal
from provision.base.text import duration
from provision.cli.options import Hosts, Json, Limit, inventory_of, passwords, with_options
from provision.doctor.certify import page
from provision.doctor.certify.certification import certify as certified
from provision.doctor.health.verdict import write_quarantine
from provision.inventory import listed
from provision.remote import progress
from provision.remote.session import Session


@with_options(passwords=passwords)
def certify(
    hosts: Hosts,
    limit: Limit = None,
    quarantine: Annotated[
        Path | None, typer.Option("--quarantine", help="List the bad hosts in this file, for `--limit '!@FILE'`.", dir_okay=False)
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write a page, too.", metavar="FILE", dir_okay=False)] = None,
    json_: Json = False,
    *,
    passwords: Mapping[str, str],
) -> None:
    """Certify hosts before work: measure cores, GPUs, memory and network, name the bad host or link.

    Every host multiplies matrices whose product is known, then meets log2(n) others (latency, loss, MTU, bandwidth); suspects meet good
    hosts before they are accused: log2(n) + 3 rounds (3 to 5 hosts: up to 8). Up to 64 hosts take two minutes. Where the
    engine is installed, growing groups of the good hosts run its allreduce.

    Exit code 0: all are good; 1: something is wrong; 2: wrong usage.
    """
    inventory = inventory_of(hosts, limit)
    if quarantine is not None and quarantine.exists():
        listed(quarantine)  # a file of something else is an error before hosts are measured
    pages.check_folder(out, "-o")
    pages.check_folder(quarantine, "--quarantine")
    with progress.make() as shown, Session(inventory, shown, passwords, command="provision certify") as session:
        made = certified(session)
        session.record.exit_code = 0 if made.ok else 1
        session.write("certificate.json", made.model_dump(by_alias=True))
    if json_:
        terminal.print_json(made.model_dump(by_alias=True, mode="json"))
    else:
        console, good = terminal.out(), len(made.hosts) - len(made.quarantined)
        for each in made.found:
            console.say(f"error: {each.where}: {each.what} [{each.id}]", hint=each.hint)
        for note in made.notes:
            console.prose(f"note: {note}")
        measured = f"{made.rounds} rounds, {len(made.pairs)} pairs, {duration(made.seconds)}"
        console.say(f"{good} of {len(made.hosts)} hosts are good ({measured})")
    if quarantine is not None:
        certain = all(each.host for each in made.found)  # whether others are known to be good
        unfit = {host: host in made.quarantined for host in made.hosts}
        terminal.say(write_quarantine(quarantine, {host: bad for host, bad in unfit.items() if bad or certain}))
    if out is not None:
        pages.write(out, page.render(made))
    if not made.ok:
        raise typer.Exit(1)
