"""The command line: parse, call one function, print."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer

from provision import __version__
from provision.base import terminal
from provision.base.errors import ProvisionError, UsageError, as_provision_error
from provision.base.problems import Problem
from provision.base.text import joined
from provision.cli import catalog as catalog_commands
from provision.cli import doctor, image, sandbox
from provision.cli.bench import bench
from provision.cli.help import App, Group, plain_errors, suggestion
from provision.cli.options import (
    AptMirror,
    Cpu,
    Data,
    Driver,
    Epochs,
    Hosts,
    Json,
    Limit,
    Np,
    OptionalHosts,
    Oversubscribe,
    driver_branch,
    inventory_of,
    passwords,
    requirements,
    url,
    use_own_files,
    with_options,
)
from provision.cli.report import logs, report, runs
from provision.cli.run_options import HostsFirst, job_containers, run_options
from provision.cli.schema import schema
from provision.cli.ssh import ssh
from provision.cli.status import PortAfterServe, status
from provision.commands import lifecycle, planning
from provision.facts import Facts
from provision.install import engine_builds, environments, installer, removal
from provision.inventory import Inventory
from provision.inventory.loading import LOCAL
from provision.launch import build_check, program, target_hosts
from provision.launch.launchers import RunOptions
from provision.plan import summary
from provision.plan.options import Options, SmokeOptions
from provision.plan.request import Request
from provision.remote import progress
from provision.remote.session import Session
from provision.report import model
from provision.resolve.what_if import WhatIf
from provision.survey import collect

_Result = TypeVar("_Result")
# Commands that must work where a catalogue file of the user's is invalid, because they help to correct it, and those that read these files
# themselves, because they can do something without them (`doctor --prolog`, `run --version`).
_WITHOUT_OWN_FILES = frozenset({"catalog", "schema", "doctor", "run"})


class _MainJobGroup(Group):
    """``provision HOSTS`` is ``provision up HOSTS`` where no command can be meant: it installs as root."""

    def invoke(self, ctx: Any) -> Any:
        with plain_errors():
            return super().invoke(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        at = next((number for number, word in enumerate(args) if not word.startswith("-")), len(args))
        word = args[at] if at < len(args) else ""
        if word and word not in self.commands:
            if not (word == LOCAL or set(word) & set(",/.[@:") or os.path.exists(word)):
                hint = f"{suggestion(word, self.commands, ctx)} (a host of this name: provision up {word})"
                raise UsageError(f"no such command '{word}'", hint=hint)
            args = [*args[:at], "up", *args[at:]]
        with plain_errors():
            return super().parse_args(ctx, args)


app = App(
    cls=_MainJobGroup,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    help="Turn a list of bare Linux hosts into a training cluster. `provision HOSTS` does everything: survey, plan, install, train.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(sandbox.app, name="sandbox")
app.add_typer(doctor.app, name="doctor")
app.add_typer(image.app, name="image")
app.add_typer(catalog_commands.app, name="catalog")


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,  # noqa: ARG001  main() acts on it
) -> None:
    if version:
        _say_version()
    if context.invoked_subcommand not in _WITHOUT_OWN_FILES:
        use_own_files()


def _say_version() -> NoReturn:
    terminal.out().say(f"provision {__version__}")
    raise typer.Exit


@app.command()
@with_options(options=requirements, passwords=passwords)
def up(
    hosts: Hosts,
    limit: Limit = None,
    check: Annotated[bool, typer.Option("--check", help="Change nothing; show what would change.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Run every step, even where the survey shows that nothing has to change.")] = False,
    first_step: Annotated[str | None, typer.Option("--from", metavar="STEP", help="Skip the steps before this one, e.g. `engine`.")] = None,
    apt_mirror: AptMirror = None,
    cpu: Cpu = None,
    driver: Driver = None,
    bundle: Annotated[
        Path | None,
        typer.Option("--bundle", help="Install from this file of `provision bundle`; no host needs a network.", dir_okay=False),
    ] = None,
    env: Annotated[
        Path | None,
        typer.Option("--env", metavar="FILE", help="Also create the environment of this uv.lock, pyproject.toml or requirements.txt."),
    ] = None,
    smoke: Annotated[bool, typer.Option("--smoke/--no-smoke", help="End with the training job (default).")] = True,
    np: Np = None,
    oversubscribe: Oversubscribe = False,
    epochs: Epochs = None,
    data: Data = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before a newer NCCL is replaced by the requested one.")] = False,
    json_: Json = False,
    *,
    options: Options,
    passwords: Mapping[str, str],
) -> None:
    """Survey the hosts, plan, install, and verify it with a training job over all of them."""
    installer.steps(first_step)  # an unknown step is an error before anything is done
    if driver and (bundle or first_step):
        raise UsageError(
            f"--driver and {'--bundle' if bundle else '--from'} exclude each other", hint="install the driver in a run of its own"
        )
    mirror = url("--apt-mirror", apt_mirror)
    options = replace(
        options,
        check=check,
        full=full,
        first_step=first_step,
        bundle=bundle,
        apt_mirror=mirror,
        cpu=cpu,
        env=env,
        driver=driver_branch(driver),
    )
    if smoke:
        options = replace(options, smoke=SmokeOptions(np=np, epochs=epochs, data=data, oversubscribe=oversubscribe))
    else:
        of_training = {"--np": np, "--oversubscribe": oversubscribe, "--epochs": epochs, "--data": data}
        for name in (name for name, value in of_training.items() if value):
            terminal.say(f"{name} has no effect: it is for the training job, which --no-smoke leaves out")
    inventory = inventory_of(hosts, limit)

    def downgrade(lines: list[str]) -> bool:
        for line in lines:
            terminal.say(line)
        return yes or check or (sys.stdin.isatty() and terminal.confirm("Replace newer packages by older ones?"))

    with progress.make() as shown:
        result = lifecycle.up(inventory, options, shown, passwords, downgrade)
    _print_report(result, json_, model.commands_after(result, hosts, sys.argv[1:], limit=limit, check=check))


@app.command()
@with_options(passwords=passwords)
def survey(
    hosts: Hosts,
    limit: Limit = None,
    json_: Json = False,
    *,
    passwords: Mapping[str, str],
) -> None:
    """Show what every host is, what is installed on it, and what would prevent an installation. Changes nothing."""
    inventory = inventory_of(hosts, limit)
    with progress.make() as shown, Session(inventory, shown, passwords, command="provision survey") as session:
        found = collect.survey_hosts(session)
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


@app.command()
@with_options(options=requirements, passwords=passwords)
def plan(
    hosts: OptionalHosts = None,
    limit: Limit = None,
    facts_file: Annotated[
        Path | None, typer.Option("--facts", help="Plan from this output of `provision survey --json`, without connecting to any host.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write the rendered playbook and its variables to this folder.", file_okay=False)
    ] = None,
    apt_mirror: AptMirror = None,
    cpu: Cpu = None,
    driver: Driver = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CHANGE",
            help="Show the plan after a change of the hosts, and what it gains: driver=580, python=3.12, without=HOST; for some hosts "
            "alone HOST:driver=580. May be repeated.",
        ),
    ] = None,
    json_: Json = False,
    *,
    options: Options,
    passwords: Mapping[str, str],
) -> None:
    """Show what would be installed where, from which source, and why."""
    if what_if and out is not None:
        raise UsageError("--what-if and --out: a plan after a change cannot be installed yet", hint="leave one of them out")
    options = replace(options, apt_mirror=url("--apt-mirror", apt_mirror), cpu=cpu, driver=driver_branch(driver))
    inventory = inventory_of(hosts, limit) if hosts is not None else None

    def fits(inventory: Inventory, found: Mapping[str, Facts], problems: Sequence[Problem]) -> bool:
        model.show_problems(problems, terminal.err())
        return _show_plan(inventory, found, problems, options, what_if=what_if or (), out=out, as_json=json_)

    if facts_file is not None:
        is_fitting = fits(*collect.read_file(facts_file, inventory, limit))
    elif inventory is None:
        raise UsageError("no hosts to plan for", hint="name HOSTS, or a file with facts: --facts FILE")
    else:
        with progress.make() as shown, Session(inventory, shown, passwords, command="provision plan") as session:
            surveyed = collect.survey_hosts(session, engine_builds.known_for(options.wheels))
            shown.close()
            is_fitting = fits(inventory, surveyed.hosts, surveyed.problems)
            session.record.exit_code = 0 if is_fitting else 1
    if not is_fitting:
        raise typer.Exit(1)


def _show_plan(
    inventory: Inventory,
    found: Mapping[str, Facts],
    problems: Sequence[Problem],
    options: Options,
    *,
    what_if: Sequence[str],
    out: Path | None,
    as_json: bool,
) -> bool:
    """Print the plan, and whether there is one. Raises ProvisionError for what is missing."""
    if what_if:
        after = planning.plan_after(Request(inventory, options), found, what_if)
        if as_json:
            terminal.print_json(after.as_dict())
        else:
            summary.show(after.plan, terminal.out())
            _show_gains(after)
        planning.refuse_conflicts(after.plan)
        return True
    request = Request.of(inventory, options)
    made, sources = planning.make_plan(request, found)
    for line in planning.describe_upgrade(request, found, made) if options.upgrade else ():
        terminal.say(line)
    if as_json:
        console = terminal.out()
        for piece in made.json():
            console.content(piece)
        planning.refuse_conflicts(made)
    elif made.conflicts:
        summary.show(made, terminal.err())
        return False
    else:
        summary.show(made, terminal.out())
        if (hint := planning.hint(request, found)) is not None:
            terminal.out().say(f"hint: {hint}", "cyan")
        if errors := [problem for problem in problems if problem.severity == "error" and problem.host in made.hosts]:
            count = f"{len(errors)} errors" if len(errors) > 1 else "1 error"
            where = joined(list(dict.fromkeys(str(problem.host) for problem in errors)))
            terminal.err().say(f"provision up would not install this: {count} at the top ({where})", "red")
    if out is not None and made.hosts:
        try:
            playbook, _variables = installer.render(made, inventory, found, sources, out.resolve())
        except OSError as error:
            raise UsageError(f"cannot be written: {error.strerror}", where=str(out), hint="name another folder: --out DIR") from error
        terminal.say(f"by hand: cd {out} && ansible-playbook -i INVENTORY {playbook.name} -e @vars.json --check")
    absent = [host.name for host in inventory.hosts if host.name not in found]
    if absent:
        they, them = ("it has", "it") if len(absent) == 1 else ("they have", "them")
        hint = f"fix the problems above, or leave {them} out: --limit" if len(absent) < len(inventory.hosts) else None
        raise ProvisionError(f"no plan for {', '.join(absent)}: {they} no facts", hint=hint)
    return True


@app.command()
@with_options(passwords=passwords)
def smoke(
    hosts: Hosts,
    limit: Limit = None,
    np: Np = None,
    oversubscribe: Oversubscribe = False,
    epochs: Epochs = None,
    data: Data = None,
    json_: Json = False,
    *,
    passwords: Mapping[str, str],
) -> None:
    """Run the training job alone, on hosts that `provision up` made ready."""
    inventory = inventory_of(hosts, limit)
    with progress.make() as shown:
        result = lifecycle.smoke(inventory, SmokeOptions(np=np, epochs=epochs, data=data, oversubscribe=oversubscribe), shown, passwords)
    _print_report(result, json_, model.commands_after(result, hosts, sys.argv[1:], limit=limit))


@app.command(cls=HostsFirst, context_settings={"allow_interspersed_args": False})
@with_options(where=target_hosts.HostOptions, options=run_options, passwords=passwords)
def run(
    *,
    where: target_hosts.HostOptions,
    options: RunOptions,
    passwords: Mapping[str, str],
) -> None:
    """Run a program, e.g. `provision run hosts.ini -np 4 train.py`, on hosts that `provision up` made ready."""
    if where.version:
        _say_version()
    use_own_files()
    inventory = target_hosts.select(where, options.np or options.per_node, options.elastic, os.environ, terminal.say)
    if where.check_build:
        with progress.make() as shown:
            lines = build_check.check(inventory, options.python, shown, passwords)
        for line in lines:
            terminal.out().say(line)
        return
    if not options.command:
        raise UsageError("no program to run", hint="name it: provision run -np 4 python train.py")
    started, file = job_containers(where, options), options.project
    if file is not None:
        environments.read(file)  # what cannot be read is an error before anything is done
    environment = (lambda session, plan: environments.ensure(session, plan, file, options.index_url)) if file is not None else None
    with progress.make() as shown:
        code = program.run(inventory, options, shown, passwords, gpu_check=where.gpu_check, environment=environment, containers=started)
    raise typer.Exit(code)


@app.command()
@with_options(options=requirements, passwords=passwords)
def bundle(
    hosts: Hosts,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The bundle to write.", dir_okay=False)],
    limit: Limit = None,
    apt_mirror: AptMirror = None,
    cpu: Cpu = None,
    *,
    options: Options,
    passwords: Mapping[str, str],
) -> None:
    """Write everything that the plan needs into one file, for hosts without a network: wheels, packages, data, with checksums."""
    options = replace(options, apt_mirror=url("--apt-mirror", apt_mirror), cpu=cpu)
    inventory = inventory_of(hosts, limit)
    if not out.absolute().parent.is_dir():
        raise UsageError(f"--out {out}: no such folder")
    with progress.make() as shown:
        survey = lifecycle.bundle(inventory, options, out.absolute(), shown, passwords)
    model.show_problems(survey.problems, terminal.err())
    if survey.blocked:
        raise typer.Exit(1)
    terminal.out().say(f"{out}: {out.stat().st_size / 1e6:.0f} MB; install from it: provision {hosts} --bundle {out}")


@app.command()
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
        found = lifecycle.remove(inventory, shown, passwords, confirmed)
    if json_:
        terminal.print_json(removal.as_dict(found))
    else:
        model.show_removals(found, terminal.out())
    if any(one.bad for one in found):
        raise typer.Exit(1)


app.command()(bench)
app.command()(schema)
app.command(context_settings={"allow_interspersed_args": False})(ssh)
app.command(cls=PortAfterServe)(status)
app.command()(runs)
app.command()(report)
app.command()(logs)


def _show_gains(after: WhatIf) -> None:
    console = terminal.out()
    console.say(f"\nwhat if {' and '.join(after.changes)}", "bold")
    if after.gains:
        console.print(terminal.table({"": gain.what, "now": gain.now or "-", "then": gain.then or "-"} for gain in after.gains))
    else:
        console.say("nothing changes")


def _print_report(result: model.Report, as_json: bool, following: Sequence[str]) -> None:
    if as_json:
        terminal.print_json(result.as_dict())
    else:
        model.show(result, terminal.out(), following)
    if not result.ok:
        raise typer.Exit(1)


def guarded(call: Callable[[], _Result], *, debug: bool) -> int:
    """Call a command and turn what it raises into a message and an exit code: 0 success, 1 something is wrong, 2 wrong usage or input,
    130 interrupted."""
    try:
        call()
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 1
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  a defect of provision, too, is one line for the user
        if debug:
            terminal.say(traceback.format_exc())
        failure = as_provision_error(error)
        for number, (text, hint) in enumerate(failure.parts()):
            terminal.err().say(text if number else f"provision: {text}", hint=hint)
        return failure.exit_code
    return 0


def main() -> None:
    """Entry point of the console script and of ``python -m provision``."""
    terminal.prepare_streams()
    debug = "--debug" in takewhile(lambda word: word.startswith("-"), sys.argv[1:])
    sys.exit(guarded(lambda: app(prog_name="provision"), debug=debug))
