"""`provision run` on the command line: parse, call one function, print."""

from __future__ import annotations

import os
from collections.abc import Mapping

import typer

from provision import __version__
from provision.base import terminal
from provision.base.errors import UsageError
from provision.cli.options import passwords, with_options
from provision.cli.run_options import HostsFirst, job_containers, run_options
from provision.install import environments
from provision.launch import build_check, program, target_hosts
from provision.launch.launchers import RunOptions
from provision.remote import progress

COMMAND = {"cls": HostsFirst, "context_settings": {"allow_interspersed_args": False}}


@with_options(where=target_hosts.HostOptions, options=run_options, passwords=passwords)
def run(*, where: target_hosts.HostOptions, options: RunOptions, passwords: Mapping[str, str]) -> None:
    """Run a program, e.g. `provision run hosts.ini -np 4 train.py`, on hosts that `provision up` made ready, or in containers: --image."""
    if where.version:
        terminal.out().say(f"provision {__version__}")
        return
    inventory = target_hosts.select(where, options.np or options.per_node, options.elastic, os.environ, terminal.say)
    started = job_containers(where, options)
    if where.check_build:
        with progress.make() as shown:
            lines = build_check.check(inventory, options.python, shown, passwords)
        for line in lines:
            terminal.out().say(line)
        return
    if not options.command:
        raise UsageError("no program to run", hint="name it: provision run -np 4 python train.py")
    file = options.project
    if file is not None:
        environments.read(file)  # what cannot be read is an error before anything is done
    environment = (lambda session, plan: environments.ensure(session, plan, file, options.index_url)) if file is not None else None
    with progress.make() as shown:
        code = program.run(inventory, options, shown, passwords, gpu_check=where.gpu_check, environment=environment, containers=started)
    raise typer.Exit(code)
