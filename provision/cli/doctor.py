"""`provision doctor …` on the command line: parse, call one function, print."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from provision.base import terminal
from provision.base.errors import UsageError
from provision.cli.help import App
from provision.cli.options import Hosts, Json, Limit, inventory_of, passwords, with_options
from provision.diagnosis import logs, signatures
from provision.diagnosis.findings import Finding, document
from provision.doctor import host_checks, remediation, show, support_archive
from provision.doctor.checks import CHECKS
from provision.doctor.host_checks import Look
from provision.inventory import Inventory
from provision.remote import progress
from provision.remote.session import Session


class _LookByDefault(TyperGroup):
    """``provision doctor [HOSTS] [--log FILE]`` is ``provision doctor look …``: what is no command belongs to the look."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ("-h", "--help")):
            args = ["look", *args]
        return super().parse_args(ctx, args)


app = App(
    cls=_LookByDefault,
    help="Names known errors, on hosts and in logs, and says how to fix them: `provision doctor [HOSTS] [--log FILE] [--fix]`; "
    "all its options: `provision doctor look --help`.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
@with_options(passwords=passwords)
def look(
    hosts: Annotated[str | None, typer.Argument(metavar="HOSTS", help="An inventory, `host1,host2`; this machine by default.")] = None,
    log: Annotated[list[str] | None, typer.Option("--log", help="A log to explain, `-` for standard input; may be given again.")] = None,
    only: Annotated[list[str] | None, typer.Option("--only", help="Only this known error; may be given again.", metavar="ID")] = None,
    fix: Annotated[bool, typer.Option("--fix", help="Show what can be fixed, ask, fix it and look again.")] = False,
    bandwidth: Annotated[bool, typer.Option("--bandwidth", help="Measure how fast the hosts reach each other, too.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    limit: Limit = None,
    json_: Json = False,
    *,
    passwords: Mapping[str, str],
) -> None:
    """Look at hosts (this machine by default), or explain logs, or both. `look` itself may be left out."""
    wanted = {signatures.named(name).id for name in only or ()}
    if hosts is None and fix:
        raise UsageError("--fix needs HOSTS", hint="provision doctor localhost --fix")
    if hosts is None and bandwidth:
        raise UsageError("--bandwidth needs HOSTS", hint="provision doctor hosts.ini --bandwidth")
    said = logs.read(log) if log else []
    if hosts is None:
        found = Look({}, [], []) if log else host_checks.here()
        _print(_chosen(_together(found, said), wanted), json_, looked_at=_named(log) if log else "this machine")
        return
    inventory = inventory_of(hosts, limit)
    with progress.make() as shown:
        session = Session(inventory, shown, passwords)
        done = True
        try:
            found = host_checks.everywhere(session, bandwidth=bandwidth)
            if fix:
                found.findings[:] = _chosen(found.findings, wanted)
                found, done = _fixed(inventory, session, found, passwords, yes)
        finally:
            session.close()
    nobody = not found.facts
    _print(_chosen(_together(found, said), wanted), json_, looked_at=_hosts(found), look=found, failed=nobody)
    if not done:
        raise typer.Exit(1)


@app.command()
def explain(identifier: Annotated[str, typer.Argument(metavar="ID", help="As `provision doctor list` names it.")]) -> None:
    """Print all that is known of one error."""
    signature = signatures.named(identifier)
    show.entry(signature, terminal.out(), live=identifier in {check.id for check in CHECKS})


@app.command()
@with_options(passwords=passwords)
def bundle(
    hosts: Hosts,
    out: Annotated[Path, typer.Option("--out", "-o", help="The archive to write (.tar.gz).", dir_okay=False)],
    log: Annotated[list[str] | None, typer.Option("--log", help="A log to add; may be given again.")] = None,
    limit: Limit = None,
    *,
    passwords: Mapping[str, str],
) -> None:
    """Collect facts, findings and logs of the hosts for a colleague, without secrets, keys, tokens and user names."""
    with progress.make() as shown:
        session = Session(inventory_of(hosts, limit), shown, passwords)
        try:
            found = host_checks.everywhere(session)
        finally:
            session.close()
    support_archive.write(out, found, [Path(name) for name in log or ()])
    terminal.out().say(str(out))


@app.command("list")
def list_() -> None:
    """Print the known errors, by layer."""
    show.catalogue(terminal.out())


def _print(found: list[Finding], as_json: bool, *, looked_at: str, look: Look | None = None, failed: bool = False) -> None:
    if as_json:
        measured = {"bandwidth": look.bandwidth} if look and look.bandwidth else {}
        terminal.print_json({**document(found), **measured})
    else:
        if look:
            show.overview(found, look.names, terminal.out())
        if look and look.bandwidth:
            show.bandwidth(look.bandwidth, terminal.out())
        show.findings(found, terminal.out(), looked_at=looked_at)
    if failed or found:
        raise typer.Exit(2 if failed else 1)


def _fixed(inventory: Inventory, session: Session, look: Look, passwords: Mapping[str, str], yes: bool) -> tuple[Look, bool]:
    """Ask, fix, look again: what is left, and whether all that was begun was done."""
    made = remediation.treatment(look)
    for finding in made.left:
        terminal.say(f"by hand: {finding.host}: {finding.title} [{finding.id}]")
    if not made.anything:
        terminal.say("nothing of this can be fixed automatically")
        return look, True
    terminal.say("this will run:")
    for line in made.lines():
        terminal.say(f"  {line}")
    if not yes and not terminal.confirm("Run it?"):
        return look, True
    before = {(finding.id, finding.host) for finding in look.findings}
    results = remediation.fix(inventory, session, look, made, passwords)
    for result in results:
        terminal.say(f"{result.state}: {result.host or 'all hosts'}: {result.id}" + (f": {result.why}" if result.why else ""))
    fresh = Session(inventory, session.progress, passwords)  # connections of its own: limits and PATH are given at login
    try:
        again = host_checks.everywhere(fresh)
    finally:
        fresh.close()
    for name, host in sorted(before - {(finding.id, finding.host) for finding in again.findings}, key=str):
        terminal.say(f"fixed: {host}: {name}")
    return again, all(result.state == "done" for result in results)


def _together(look: Look, said: list[Finding]) -> list[Finding]:
    return host_checks.with_logs(look.findings, said, {check.id for check in CHECKS}) if look.facts else [*said, *look.findings]


def _chosen(found: list[Finding], wanted: set[str]) -> list[Finding]:
    return [finding for finding in found if not wanted or finding.id in wanted]


def _hosts(look: Look) -> str:
    return f"{len(look.facts)} of {len(look.names)} hosts"


def _named(names: list[str]) -> str:
    shown = ["standard input" if name == "-" else name for name in names]
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")
