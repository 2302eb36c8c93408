"""`provision sandbox …` on the command line: parse, call one function, print."""

from __future__ import annotations

from typing import Annotated, get_args

import typer

from provision import sandbox
from provision.base import terminal
from provision.base.text import joined
from provision.base.validation import MAX_COUNT, max_here
from provision.cli.help import App
from provision.cli.options import one_of
from provision.sandbox import names

app = App(no_args_is_help=True, help="Throw-away hosts on this machine: containers with sshd, or Linux namespaces.")

Name = Annotated[str, typer.Option("--name", help="Name of the sandbox; several can exist side by side.")]


@app.command()
def up(
    count: Annotated[int, typer.Option("-n", "--count", min=1, max=max_here(), help="Number of hosts.")] = 2,
    base: Annotated[
        list[str] | None, typer.Option("--base", help="Image of the hosts, e.g. debian:12; can be repeated to mix several.")
    ] = None,
    name: Name = "default",
    sudo: Annotated[str, typer.Option("--sudo", help="How the user becomes root: nopasswd, password or none.")] = "nopasswd",
    slots: Annotated[int, typer.Option("--slots", min=1, max=MAX_COUNT, help="Ranks per host.")] = 2,
    engine: Annotated[
        str, typer.Option("--engine", help="What runs the hosts: docker, or namespaces (root); default: the first possible.")
    ] = "",
) -> None:
    """Start hosts and write an inventory of them."""
    mode = one_of("--sudo", sudo, get_args(sandbox.SudoMode))
    kind = one_of("--engine", engine, get_args(sandbox.EngineName)) if engine else None
    made = sandbox.up(count=count, base=base or None, name=name, say=terminal.say, sudo=mode, slots=slots, engine=kind)
    terminal.out().say(str(made.inventory))


@app.command()
def check() -> None:
    """Say what `up` would run hosts with: a container engine, or namespaces; if neither is possible, why not."""
    hosts = {"docker": "containers: a container engine answers", "namespaces": "namespaces of this machine: no container engine answers"}
    terminal.out().say(hosts[sandbox.engine_for_hosts()])


@app.command()
def status(name: Name = "default") -> None:
    """Show the hosts and their state."""
    found = sandbox.status(name)
    if found is None:
        others = [one.name for one in sandbox.every()]
        seen = f" (others: {joined(others)})" if others else ""
        terminal.out().say(f"no sandbox '{name}' is up{seen}; start it: {names.command('up', name)}")
        raise typer.Exit(1)
    terminal.out().print(
        terminal.table([{"host": host.name, "address": host.address, "base": host.base, "state": host.state} for host in found.hosts])
    )
    terminal.out().say(f"inventory: {found.inventory}")


@app.command("ls")
def list_() -> None:
    """List all sandboxes of this machine."""
    found = sandbox.every()
    if not found:
        terminal.out().say("no sandbox is up; start one: provision sandbox up")
        return
    terminal.out().print(
        terminal.table(
            [
                {
                    "sandbox": one.name,
                    "hosts": str(len(one.hosts)),
                    "engine": one.engine,
                    "state": "running" if one.running else joined(sorted({host.state for host in one.hosts})),
                    "inventory": str(one.inventory) if one.inventory.exists() else f"not in {one.inventory.parent}",
                }
                for one in found
            ]
        )
    )
    for one in found:
        if not one.inventory.exists():
            why = "it was made with another PROVISION_HOME, or its files were removed"
            if one.inventory.parent.exists():
                why = "it is still being made, or its making was interrupted"
            terminal.out().say(f"{one.name}: {why}; if it is no longer needed: {names.command('down', one.name)}")


@app.command()
def down(name: Name = "default") -> None:
    """Remove the hosts and everything that was made for them."""
    removed = sandbox.down(name, say=terminal.say)
    terminal.out().say(f"removed {len(removed)} things" if removed else "nothing to remove")
