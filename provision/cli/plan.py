"""`provision plan` on the command line: parse, call one function, print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from provision.base import terminal
from provision.base.errors import ProvisionError, UsageError
from provision.base.problems import Problem
from provision.base.text import counted, joined
from provision.cli.options import Json, Limit, inventory_of, passwords, plan_options, with_options
from provision.commands import planning
from provision.install import engine_builds, installer
from provision.plan import summary
from provision.plan.options import Options
from provision.plan.request import Request, engine_of
from provision.remote import progress
from provision.remote.session import Session
from provision.report import model
from provision.survey import Facts, collect


@dataclass(frozen=True)
class _Shown:
    """How the plan is shown, and after which changes of the hosts."""

    why: bool
    out: Path | None
    what_if: Sequence[str]
    json: bool


def _shown(
    why: Annotated[bool, typer.Option("--why", help="Show all reasons, rejected candidates, networks and packages.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write the rendered playbook and its variables to this folder.", file_okay=False)
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CHANGE",
            help="Show the plan after a change of the hosts, and what it gains: driver=580, python=3.12, without=HOST; for some hosts "
            "alone HOST:driver=580. May be repeated.",
        ),
    ] = None,
    json_: Json = False,
) -> _Shown:
    if what_if and out is not None:
        raise UsageError("--what-if and --out: a plan after a change cannot be installed yet", hint="leave one of them out")
    return _Shown(why, out, what_if or (), json_)


@with_options(shown=_shown, options=plan_options("cpu", "driver", "apt_mirror"), passwords=passwords)
def plan(
    hosts: Annotated[list[str] | None, typer.Argument(metavar="HOSTS", show_default=False, help="As for `up`; none with --facts.")] = None,
    limit: Limit = None,
    facts_file: Annotated[
        Path | None, typer.Option("--facts", help="Plan from this output of `provision survey --json`, without connecting to any host.")
    ] = None,
    *,
    shown: _Shown,
    options: Options,
    passwords: Mapping[str, str],
) -> None:
    """Show what would be installed where, from which source, and why."""
    inventory = inventory_of(hosts, limit) if hosts else None

    known_for = engine_builds.known_for(engine_of(options.wheels), options.catalog)
    if facts_file is not None:
        inventory, found, problems = collect.read_file(facts_file, inventory, limit, options.catalog, known_for)
        is_fitting = _show_plan(Request.of(inventory, options), found, problems, shown)
    elif inventory is None:
        raise UsageError("no hosts to plan for", hint="name HOSTS, or a file with facts: --facts FILE")
    else:
        with progress.make() as bar, Session(inventory, bar, passwords, command="provision plan", catalog=options.catalog) as session:
            request = Request.of(inventory, options)
            surveyed = collect.survey_hosts(session, known_for, tries_networks=True)
            bar.close()
            is_fitting = _show_plan(request, surveyed.hosts, surveyed.problems, shown)
            session.record.exit_code = 0 if is_fitting else 1
    if not is_fitting:
        raise typer.Exit(1)


def _show_plan(request: Request, found: Mapping[str, Facts], problems: Sequence[Problem], shown: _Shown) -> bool:
    """Print the problems and the plan; whether there is one. Raises ProvisionError for what is missing."""
    model.show_problems(problems, terminal.err())
    inventory = request.inventory
    if shown.what_if:
        after = planning.plan_after(request, found, shown.what_if)
        if shown.json:
            terminal.print_json(after.as_dict())
        else:
            summary.show(after.plan, terminal.out(), why=shown.why)
            console = terminal.out()
            console.say(f"\nwhat if {' and '.join(after.changes)}", "bold")
            if after.gains:
                console.print(terminal.table({"": gain.what, "now": gain.now or "-", "then": gain.then or "-"} for gain in after.gains))
            else:
                console.say("nothing changes")
        after.plan.refuse_conflicts()
        return True
    rollout = planning.make_plan(request, found)
    made = rollout.plan
    for line in planning.describe_upgrade(rollout) if request.options.upgrade else ():
        terminal.say(line)
    if shown.json:
        console = terminal.out()
        for piece in made.json():
            console.content(piece)
        made.refuse_conflicts()
    elif made.conflicts:
        summary.show(made, terminal.err(), why=shown.why)
        return False
    else:
        summary.show(made, terminal.out(), why=shown.why)
        if (hint := planning.hint(rollout)) is not None:
            terminal.out().say(f"hint: {hint}", "cyan")
        if errors := [problem for problem in problems if problem.severity == "error" and problem.host in made.hosts]:
            where = joined(list(dict.fromkeys(str(problem.host) for problem in errors)))
            terminal.err().say(f"provision up would not install this: {counted(len(errors), 'error')} at the top ({where})", "red")
    if shown.out is not None and made.hosts:
        try:
            playbook, *_ = installer.render(rollout, shown.out.resolve())
        except OSError as error:
            raise UsageError(f"cannot be written: {error.strerror}", where=str(shown.out), hint="name another folder: --out DIR") from error
        terminal.say(f"by hand: cd {shown.out} && ansible-playbook -i INVENTORY {playbook.name} -e @vars.json --check")
    absent = [host.name for host in inventory.hosts if host.name not in found]
    if absent:
        they, them = ("it has", "it") if len(absent) == 1 else ("they have", "them")
        hint = f"fix the problems above, or leave {them} out: --limit" if len(absent) < len(inventory.hosts) else None
        raise ProvisionError(f"no plan for {', '.join(absent)}: {they} no facts", hint=hint)
    return True
