"""`provision up` on the command line: parse, call one function, print."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from provision.base import terminal
from provision.base.errors import UsageError
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
    Oversubscribe,
    inventory_of,
    passwords,
    requirements,
    url,
    with_options,
)
from provision.commands.up import make_ready
from provision.install import roles
from provision.plan.options import Options, SmokeOptions
from provision.remote import progress
from provision.report import model
from provision.resolve.driver import AUTO, known_branch


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
        Path | None, typer.Option("--bundle", help="Install from this file of `provision bundle`; no host needs a network.", dir_okay=False)
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
    roles.steps(first_step)  # an unknown step is an error before anything is done
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
        driver=driver and known_branch(driver, f"--driver {driver}", AUTO),
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
        result = make_ready(inventory, options, shown, passwords, downgrade)
    print_report(result, json_, model.commands_after(result, hosts, sys.argv[1:], limit=limit, check=check))


def print_report(result: model.Report, as_json: bool, following: Sequence[str]) -> None:
    """Print what a run did, for people or as JSON. Raises Exit where something is wrong."""
    if as_json:
        terminal.print_json(result.as_dict())
    else:
        model.show(result, terminal.out(), following)
    if not result.ok:
        raise typer.Exit(1)
