"""`provision init` on the command line: parse, ask, call one function, print."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer

from provision.base import terminal
from provision.base.errors import UsageError
from provision.base.text import counted, joined
from provision.cli.options import inventory_of, passwords, with_options
from provision.cli.survey import surveyed
from provision.inventory import Inventory


@with_options(passwords=passwords)
def init(
    hosts: Annotated[list[str] | None, typer.Argument(metavar="ADDRESSES", show_default=False, help="Asked for by default.")] = None,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="The inventory to write.", dir_okay=False)] = Path("hosts.ini"),
    *,
    passwords: Mapping[str, str],
) -> None:
    """Ask for the hosts, try ssh, sudo and Python on each, say what is missing, and write the inventory. Changes nothing on hosts."""
    if out.exists():
        raise UsageError(f"{out} is there already", hint=f"use it: provision {out}, or write another: -o FILE")
    inventory = inventory_of(hosts or _asked())
    if inventory.source is not None:
        raise UsageError(f"{inventory.argument} is an inventory already", hint=f"provision survey {inventory.argument}")
    found, console = surveyed(inventory, passwords, "provision init"), terminal.out()
    try:
        with out.open("x", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in _lines(inventory))
    except OSError as error:
        raise UsageError(f"cannot be written: {error.strerror}", where=str(out)) from error
    unfit = f", of which {joined(found.blocked)} cannot be used yet" if found.blocked else ""
    console.say(f"{out}: {counted(len(inventory.hosts), 'host')}{unfit}")
    console.say(f"Next: {shlex.join(['provision', 'survey' if found.blocked else 'up', str(out)])}")
    if found.blocked:
        raise typer.Exit(1)


def _asked() -> list[str]:
    """Words of HOSTS. Raises UsageError without a terminal."""
    if not sys.stdin.isatty():
        raise UsageError("no terminal to ask for the hosts on", hint="name them: provision init 192.168.1.20 admin@192.168.1.21")
    words = terminal.ask("Addresses of the hosts, with spaces between them").replace(",", " ").split()
    user = terminal.ask("User on the hosts (with sudo, or root); empty: as ssh chooses", default="")
    return [word if "@" in word or not user else f"{user}@{word}" for word in words]


def _lines(inventory: Inventory) -> Iterator[str]:
    """The inventory as INI. Ansible reads a value as a shell reads a word: users may have a backslash."""
    yield "[hosts]"
    for host in inventory.hosts:
        values = {
            "ansible_user": host.user,
            "ansible_port": host.port,
            "ansible_connection": "local" if host.connection == "local" else None,
        }
        yield " ".join([host.name, *(f"{name}={shlex.quote(str(value))}" for name, value in values.items() if value is not None)])
