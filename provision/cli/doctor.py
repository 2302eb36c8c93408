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
from provision.doctor import fixes, show, support_bundle
from provision.doctor.checks import CHECKED
from provision.doctor.host_checks import Examination, examine_hosts, examine_this_machine, with_logs
from provision.inventory import Inventory
from provision.remote import progress
from provision.remote.session import Session


class _CheckByDefault(TyperGroup):
    """``provision doctor [HOSTS] [--log FILE]`` is ``provision doctor check …``; ``look`` is that command's old name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args[:1] == ["look"]:
            terminal.say("doctor look is deprecated: leave `look` out, or use `doctor check`")
            args = ["check", *args[1:]]
        if not args or (args[0] not in self.commands and args[0] not in ("-h", "--help")):
            args = ["check", *args]
        return super().parse_args(ctx, args)


app = App(
    cls=_CheckByDefault,
    help="Find known errors on hosts and in logs, and show how to fix them: `provision doctor [HOSTS] [--log FILE] [--fix]`; "
    "all its options: `provision doctor check --help`.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
@with_options(passwords=passwords)
def check(
    hosts: Annotated[str | None, typer.Argument(metavar="HOSTS", help="An inventory, `host1,host2`; this machine by default.")] = None,
    log: Annotated[list[str] | None, typer.Option("--log", help="A log to read, `-` for standard input; may be repeated.")] = None,
    only: Annotated[list[str] | None, typer.Option("--only", help="Only this known error; may be repeated.", metavar="ID")] = None,
    fix: Annotated[bool, typer.Option("--fix", help="Show what can be fixed, ask, fix it and check again.")] = False,
    bandwidth: Annotated[bool, typer.Option("--bandwidth", hidden=True)] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    limit: Limit = None,
    json_: Json = False,
    *,
    passwords: Mapping[str, str],
) -> None:
    """Check hosts (this machine by default), or read logs, or both. `check` itself may be left out."""
    wanted = {signatures.known_error(name).id for name in only or ()}
    if hosts is None and fix:
        raise UsageError("--fix needs HOSTS", hint="provision doctor localhost --fix")
    if bandwidth:
        terminal.say("--bandwidth is deprecated and measures nothing: `provision bench HOSTS` measures every pair of hosts")
    in_logs = logs.read(log) if log else []
    if hosts is None:
        if log:
            _print(_chosen(in_logs, wanted), json_, examined=_names(log))
        else:
            found = examine_this_machine().findings
            _print(_chosen(found, wanted), json_, examined="this machine")
        return
    inventory = inventory_of(hosts, limit)
    with progress.make() as shown:
        session = Session(inventory, shown, passwords)
        fixed = True
        try:
            examination = examine_hosts(session)
            if fix:
                examination.findings[:] = _chosen(examination.findings, wanted)
                examination, fixed = _fix(inventory, session, examination, passwords, yes)
        finally:
            session.close()
    checked = CHECKED if examination.facts else frozenset[str]()
    findings = _chosen(with_logs(examination.findings, in_logs, checked), wanted)
    if not json_:
        show.overview(findings, examination.hosts, terminal.out())
    answered = len(examination.facts)
    _print(findings, json_, examined=f"{answered} of {len(examination.hosts)} hosts", failed=not answered)
    if not fixed:
        raise typer.Exit(1)


@app.command()
def explain(identifier: Annotated[str, typer.Argument(metavar="ID", help="As `provision doctor list` names it.")]) -> None:
    """Print everything that is known about one error."""
    show.entry(signatures.known_error(identifier), terminal.out(), checked=identifier in CHECKED)


@app.command()
@with_options(passwords=passwords)
def bundle(
    hosts: Hosts,
    out: Annotated[Path, typer.Option("--out", "-o", help="The archive to write (.tar.gz).", dir_okay=False)],
    log: Annotated[list[str] | None, typer.Option("--log", help="A log to add; may be repeated.")] = None,
    limit: Limit = None,
    *,
    passwords: Mapping[str, str],
) -> None:
    """Collect facts, findings and logs of the hosts for a colleague, without secrets, keys, tokens and user names."""
    with progress.make() as shown:
        session = Session(inventory_of(hosts, limit), shown, passwords)
        try:
            examination = examine_hosts(session)
        finally:
            session.close()
    support_bundle.write(out, examination, [Path(name) for name in log or ()])
    terminal.out().say(str(out))


@app.command("list")
def list_() -> None:
    """Print the known errors, by layer."""
    show.known_errors(terminal.out())


def _print(found: list[Finding], as_json: bool, *, examined: str, failed: bool = False) -> None:
    if as_json:
        terminal.print_json(document(found))
    else:
        show.findings(found, terminal.out(), examined=examined)
    if failed or found:
        raise typer.Exit(2 if failed else 1)


def _fix(
    inventory: Inventory, session: Session, examination: Examination, passwords: Mapping[str, str], yes: bool
) -> tuple[Examination, bool]:
    """Ask, fix, check again: what is left, and whether everything that was begun was done."""
    planned = fixes.plan(examination)
    for finding in planned.manual:
        terminal.say(f"by hand: {finding.host}: {finding.what} [{finding.id}]")
    lines = planned.lines()
    if not lines:
        terminal.say("nothing of this can be fixed automatically")
        return examination, True
    terminal.say("this will run:")
    for line in lines:
        terminal.say(f"  {line}")
    if not yes and not terminal.confirm("Run it?"):
        return examination, True
    results = fixes.apply(planned, examination, inventory, session, passwords)
    for result in results:
        terminal.say(f"{result.state}: {result.host or 'all hosts'}: {result.id}" + (f": {result.reason}" if result.reason else ""))
    fresh = Session(inventory, session.progress, passwords)  # with new connections: limits and PATH are set at login
    try:
        again = examine_hosts(fresh)
    finally:
        fresh.close()
    before, after = ({(finding.id, finding.host) for finding in each.findings} for each in (examination, again))
    for name, host in sorted(before - after, key=str):
        terminal.say(f"fixed: {host}: {name}")
    return again, all(result.state == "done" for result in results)


def _chosen(found: list[Finding], wanted: set[str]) -> list[Finding]:
    return [finding for finding in found if not wanted or finding.id in wanted]


def _names(logs: list[str]) -> str:
    shown = ["standard input" if name == "-" else name for name in logs]
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")
