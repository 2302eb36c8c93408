"""The command line: parse, call one function, print. No logic lives here."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperGroup

from provision import __version__, sandbox
from provision.base import terminal
from provision.base.errors import ProvisionError, UsageError, told
from provision.cli import doctor, image
from provision.cli.bench import bench
from provision.cli.help import App
from provision.cli.options import (
    AptMirror,
    Cpu,
    Data,
    Epochs,
    Hosts,
    HostsOrNot,
    Json,
    Limit,
    Np,
    Oversubscribe,
    also,
    inventory_of,
    passwords,
    requirements,
    url,
)
from provision.cli.run_options import HostOptions, run_options
from provision.cli.schema import schema
from provision.commands import lifecycle, planning
from provision.install import installer, removal
from provision.launch import build_check, program, target_hosts
from provision.plan import summary
from provision.plan.options import Options, SmokeOptions
from provision.remote import progress
from provision.remote.session import Session
from provision.report import model
from provision.survey import collect

_Result = TypeVar("_Result")


class _MainJobGroup(TyperGroup):
    """``provision HOSTS`` is ``provision up HOSTS``: a first word that is no command is taken as HOSTS."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            args = ["up", *args]
        return super().parse_args(ctx, args)


app = App(
    cls=_MainJobGroup,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    help="Turns a list of bare Linux hosts into a cluster that trains. `provision HOSTS` does it all: survey, plan, install, train.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
sandbox_app = App(no_args_is_help=True, help="Throw-away hosts on this machine: containers with sshd.")
app.add_typer(sandbox_app, name="sandbox")
app.add_typer(doctor.app, name="doctor")
app.add_typer(image.app, name="image")
app.command()(bench)
app.command()(schema)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,  # noqa: ARG001  main() acts on it
) -> None:
    if version:
        terminal.out().say(f"provision {__version__}")
        raise typer.Exit


@app.command()
@also(options=requirements, passwords=passwords)
def up(
    hosts: Hosts,
    limit: Limit = None,
    check: Annotated[bool, typer.Option("--check", help="Change nothing; say what would change.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Run every step, also where the survey shows that there is nothing to do.")] = False,
    first_step: Annotated[
        str | None, typer.Option("--from", metavar="STEP", help="Leave out the steps before this one, e.g. `engine`.")
    ] = None,
    apt_mirror: AptMirror = None,
    cpu: Cpu = None,
    bundle: Annotated[
        Path | None,
        typer.Option("--bundle", help="Install from this file of `provision bundle`; no host asks any network.", dir_okay=False),
    ] = None,
    smoke: Annotated[bool, typer.Option("--smoke/--no-smoke", help="Finish with the training job (default).")] = True,
    np: Np = None,
    oversubscribe: Oversubscribe = False,
    epochs: Epochs = None,
    data: Data = None,
    json_: Json = False,
    *,
    options: Options,
    passwords: Mapping[str, str],
) -> None:
    """The main job: survey, plan, install, and a training run over all hosts that proves it."""
    if first_step == "cmake":
        terminal.say("--from cmake is deprecated: cmake is installed by the step python; use --from python")
        first_step = "python"
    installer.steps(first_step)  # a step that does not exist is said before anything is done
    mirror = url("--apt-mirror", apt_mirror)
    options = replace(options, check=check, full=full, first_step=first_step, bundle=bundle, apt_mirror=mirror, cpu=cpu)
    if smoke:
        options = replace(options, smoke=SmokeOptions(np=np, epochs=epochs, data=data, oversubscribe=oversubscribe))
    inventory = inventory_of(hosts, limit)
    with progress.make() as shown:
        result = lifecycle.up(inventory, options, shown, passwords)
    _print_report(result, json_)


@app.command()
@also(passwords=passwords)
def survey(
    hosts: Hosts,
    limit: Limit = None,
    json_: Json = False,
    *,
    passwords: Mapping[str, str],
) -> None:
    """Look at every host and say what it is, what it holds, and what stands in the way. Changes nothing."""
    inventory = inventory_of(hosts, limit)
    with progress.make() as shown:
        found = collect.survey_hosts(Session(inventory, shown, passwords))
    if json_:
        terminal.document(found.as_dict())
    else:
        console = terminal.out()
        if found.hosts:
            console.print(terminal.table(collect.summary(found.hosts)))
        model.show_problems(found.problems, console)
    if found.blocked:
        raise typer.Exit(1)


@app.command()
@also(options=requirements, passwords=passwords)
def plan(
    hosts: HostsOrNot = None,
    limit: Limit = None,
    facts_file: Annotated[
        Path | None, typer.Option("--facts", help="Plan from this file, as `provision survey --json` writes it, and touch no host.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Leave the rendered playbook and its variables in this folder.", file_okay=False)
    ] = None,
    apt_mirror: AptMirror = None,
    cpu: Cpu = None,
    json_: Json = False,
    *,
    options: Options,
    passwords: Mapping[str, str],
) -> None:
    """What would be installed where, from where, and why."""
    options = replace(options, apt_mirror=url("--apt-mirror", apt_mirror), cpu=cpu)
    inventory = inventory_of(hosts, limit) if hosts is not None else None
    if facts_file is not None:
        inventory, found, problems = collect.read_file(facts_file, inventory, limit)
        model.show_problems(problems, terminal.err())
    elif inventory is None:
        raise UsageError("nothing to plan for", hint="name HOSTS, or a file with facts: --facts FILE")
    else:
        with progress.make() as shown:
            looked = collect.survey_hosts(Session(inventory, shown, passwords))
        model.show_problems(looked.problems, terminal.err())
        found = looked.hosts
    made, sources = planning.make_plan(inventory, found, options, planning.lock_to_keep(inventory, options))
    for line in planning.upgrade(inventory, found, made) if options.upgrade else ():
        terminal.say(line)
    if json_:
        console = terminal.out()
        for piece in made.json():
            console.content(piece)
        planning.refuse_conflicts(made)
    elif made.conflicts:
        summary.show(made, terminal.err())
        raise typer.Exit(1)
    else:
        summary.show(made, terminal.out())
    if out is not None and made.hosts:
        playbook, _variables = installer.render(made, inventory, found, sources, out.resolve())
        terminal.say(f"by hand: cd {out} && ansible-playbook -i INVENTORY {playbook.name} -e @vars.json --check")
    absent = [host.name for host in inventory.hosts if host.name not in found]
    if absent:
        raise ProvisionError(
            f"no plan for {', '.join(absent)}: nothing is known of them", hint="fix what stands above, or leave them out: --limit"
        )


@app.command()
@also(passwords=passwords)
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
    """The training job alone, on hosts that `provision up` made ready."""
    inventory = inventory_of(hosts, limit)
    with progress.make() as shown:
        result = lifecycle.smoke(inventory, SmokeOptions(np=np, epochs=epochs, data=data, oversubscribe=oversubscribe), shown, passwords)
    _print_report(result, json_)


@app.command(context_settings={"allow_interspersed_args": False})
@also(asked=HostOptions, options=run_options, passwords=passwords)
def run(
    *,
    asked: HostOptions,
    options: program.RunOptions,
    passwords: Mapping[str, str],
) -> None:
    """Launch a program of yours, e.g. `provision run -np 4 python train.py`, on hosts that `provision up` made ready."""
    if asked.version:
        _root(version=True)
    target_hosts.refuse_ranks(os.environ)
    hosts, entries, hostfile = asked.hosts, asked.host, asked.hostfile
    if target_hosts.is_list(hosts, options.np):
        if entries is not None:
            raise UsageError("--hosts and -H say the same thing; give one of them")
        hosts, entries = None, hosts
    if entries is not None and hostfile is not None:
        raise UsageError("-H and --hostfile say the same thing; give one of them")
    wanted = target_hosts.of_file(hostfile) if hostfile else target_hosts.of_list(entries) if entries else []
    elastic = options.elastic
    if not wanted and not hosts:
        discovered = target_hosts.of_script(elastic.script, elastic.slots_per_host) if elastic and elastic.script else None
        wanted = discovered or target_hosts.of_launcher(os.environ)
    chosen = target_hosts.choose(hosts, wanted, options.np, terminal.say)
    inventory = target_hosts.reached_by(chosen, asked.ssh_port, asked.ssh_identity_file)
    if asked.check_build:
        with progress.make() as shown:
            found = build_check.look(inventory, options.python, shown, passwords)
        for name, said in found.items():
            for line in build_check.lines(name, said):
                terminal.out().say(line)
        return
    if not options.command:
        raise UsageError("no program to launch", hint="name it: provision run -np 4 python train.py")
    with progress.make() as shown:
        code = program.run(inventory, options, shown, passwords)
    raise typer.Exit(code)


@app.command()
@also(options=requirements, passwords=passwords)
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
    """Gather everything that the plan needs into one file, for hosts that reach nothing: wheels, packages, data, with checksums."""
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
@also(passwords=passwords)
def remove(
    hosts: Hosts,
    limit: Limit = None,
    check: Annotated[bool, typer.Option("--check", help="Change nothing; say what would go.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json_: Json = False,
    *,
    passwords: Mapping[str, str],
) -> None:
    """Take off the hosts exactly what `provision up` put there: its packages, files, keys and folders, and nothing else."""
    inventory = inventory_of(hosts, limit)
    if not (yes or check or sys.stdin.isatty()):
        raise UsageError("no terminal to ask on whether to remove it", hint="say --yes, or look first with --check")

    def wanted(found: list[removal.HostRemoval]) -> bool:
        if check or yes:
            return not check
        model.show_removals(found, terminal.err())
        return terminal.confirm("Remove all that?")

    with progress.make() as shown:
        found = lifecycle.remove(inventory, shown, passwords, wanted)
    if json_:
        terminal.document(removal.as_dict(found))
    else:
        model.show_removals(found, terminal.out())
    if any(one.bad for one in found):
        raise typer.Exit(1)


@sandbox_app.command("up")
def sandbox_up(
    count: Annotated[int, typer.Option("-n", "--count", help="Hosts.")] = 2,
    base: Annotated[
        list[str] | None, typer.Option("--base", help="Image of the hosts, e.g. debian:12; give it several times to mix.")
    ] = None,
    name: Annotated[str, typer.Option("--name", help="Several sandboxes can live side by side.")] = "default",
    sudo: Annotated[str, typer.Option("--sudo", help="nopasswd, password or none.")] = "nopasswd",
    slots: Annotated[int, typer.Option("--slots", min=1, help="Ranks a host.")] = 2,
) -> None:
    """Start hosts and write an inventory for them."""
    kind: Any = sudo
    made = sandbox.up(count=count, base=base or None, name=name, say=terminal.say, sudo=kind, slots=slots)
    terminal.out().say(str(made.inventory))


@sandbox_app.command("check")
def sandbox_check() -> None:
    """Whether a container engine answers; if not, why, and how to get one."""
    answers, why = sandbox.engine_available()
    if not answers:
        raise ProvisionError(why)
    terminal.out().say("a container engine answers")


@sandbox_app.command("status")
def sandbox_status(name: Annotated[str, typer.Option("--name")] = "default") -> None:
    """What runs."""
    found = sandbox.status(name)
    if found is None:
        terminal.out().say("no sandbox is up; start one: provision sandbox up")
        raise typer.Exit(1)
    terminal.out().print(
        terminal.table([{"host": host.name, "address": host.address, "base": host.base, "state": host.state} for host in found.hosts])
    )
    terminal.out().say(f"inventory: {found.inventory}")


@sandbox_app.command("down")
def sandbox_down(name: Annotated[str, typer.Option("--name")] = "default") -> None:
    """Remove the hosts and everything that was made for them."""
    removed = sandbox.down(name, say=terminal.say)
    terminal.out().say(f"removed {len(removed)} things" if removed else "nothing was there")


def _print_report(result: model.Report, as_json: bool) -> None:
    if as_json:
        terminal.document(result.as_dict())
    else:
        model.show(result, terminal.out())
    if not result.ok:
        raise typer.Exit(1)


def guarded(call: Callable[[], _Result], *, debug: bool) -> int:
    """Call a command and turn what it raises into a message and an exit code: 0 well, 1 something is wrong, 2 wrong usage or input."""
    try:
        call()
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 1
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  the last resort: also a defect of ours is said in one line
        if debug:
            terminal.say(traceback.format_exc())
        said = told(error)
        for number, (text, hint) in enumerate(said.parts()):
            terminal.err().say(text if number else f"provision: {text}", hint=hint)
        return said.exit_code
    return 0


def main() -> None:
    """Entry point of the console script and of ``python -m provision``."""
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    debug = "--debug" in own
    rest = [word for word in own if word != "--debug"] + sys.argv[1 + len(own) :]
    sys.exit(guarded(lambda: app(args=rest, prog_name="provision"), debug=debug))
