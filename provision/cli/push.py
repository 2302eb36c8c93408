"""`provision push` on the command line: parse, call one function, print."""

from __future__ import annotations

import os
import posixpath
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from provision.base import terminal
from provision.base.errors import UsageError
from provision.base.text import counted, duration, size
from provision.cli.options import Hosts, Json, Limit, inventory_of, passwords, with_options
from provision.launch.push import Data, Push
from provision.remote import host_locks, progress
from provision.remote.session import Session

_UNITS = {"k": 1e3, "M": 1e6, "G": 1e9}


@with_options(passwords=passwords)
def push(
    hosts: Hosts,
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A file or folder here: a data set, a model.")],
    to: Annotated[str, typer.Option("--to", metavar="PATH", help="Its path there (~/provision-data/NAME).", show_default=False)] = "",
    rate: Annotated[str | None, typer.Option("--rate", metavar="RATE", help="What each host, and this machine, sends: 50MB/s.")] = None,
    limit: Limit = None,
    json_: Json = False,
    *,
    passwords: Mapping[str, str],
) -> None:
    """Copy a file or folder to all hosts of a cluster: from here once, then from host to host. What a host has is not sent again."""
    inventory = inventory_of(hosts, limit)
    place = to or f"~/provision-data/{os.path.basename(os.path.abspath(source))}"
    dest = posixpath.normpath(place[2:].lstrip("/") if place.startswith("~/") else place)
    if re.fullmatch(r"/|\.|(\.\.(/.*)?)|~.*|provision-data(/\.records(/.*)?)?", dest, re.DOTALL):
        raise UsageError(f"invalid --to {to or source}: expected the path of a file or folder")
    most = re.fullmatch(r"(\d{1,9}(?:\.\d+)?) ?([kMG])B(?:/s)?", rate or "0GB")
    if not most or (rate and float(most[1]) * _UNITS[most[2]] < 1e6):  # less looks like a host that has stopped
        raise UsageError(f"invalid --rate {rate}: expected a rate such as 50MB/s, and at least 1MB/s")
    with progress.make() as shown, host_locks.acquired(inventory, "provision push"):
        shown.doing(f"reading {source} …")
        data, began = Data(source, posixpath.basename(dest)), time.monotonic()
        with Session(inventory, shown, passwords, command="provision push") as session:
            shown.stage(f"Push {counted(data.files, 'file')}, {size(data.bytes)}", [host.name for host in inventory.hosts])
            for line in data.left_out:
                shown.line(line.partition(";")[0])
            made = Push(session, data, dest, float(most[1]) * _UNITS[most[2]])
            made.run()
            done = [each for each in made.targets if not each.failed]
            session.record.exit_code = int(len(done) < len(made.targets))
    if json_:
        each_host = [{"host": each.host.name, "received": each.came, "problem": each.failed or None} for each in made.targets]
        about = {"ok": not session.record.exit_code, "path": dest, "digest": data.digest, "files": data.files, "bytes": data.bytes}
        terminal.print_json({"schema": 1, **about, "seconds": round(time.monotonic() - began, 1), "hosts": each_host})
    elif done:
        what = f"pushed {counted(data.files, 'file')}, {size(data.bytes)} to {counted(len(done), 'host')}"
        terminal.out().say(f"{what} in {duration(time.monotonic() - began)}: {'' if dest.startswith('/') else '~/'}{dest}")
    if session.record.exit_code:
        raise typer.Exit(1)
