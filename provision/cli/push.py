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

_UNITS = {"k": 10**3, "M": 10**6, "G": 10**9}


@with_options(passwords=passwords)
def push(
    hosts: Hosts,
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A file or folder here: a data set, a model.")],
    to: Annotated[
        str | None, typer.Option("--to", metavar="PATH", help="Its path there, by default ~/provision-data/NAME, as here.")
    ] = None,
    rate: Annotated[str | None, typer.Option("--rate", metavar="RATE", help="What each host, and this machine, sends: 50MB/s.")] = None,
    limit: Limit = None,
    json_: Json = False,
    *,
    passwords: Mapping[str, str],
) -> None:
    """Copy a file or folder to all hosts of a cluster: from here once, then from host to host. What a host has is not sent again."""
    inventory, most = inventory_of(hosts, limit), _rate(rate)
    dest = posixpath.normpath((to or f"provision-data/{os.path.basename(os.path.abspath(source))}").removeprefix("~/"))
    if posixpath.basename(dest) in ("", ".", "..") or dest.startswith("~"):
        raise UsageError(f"invalid --to {to or source}: expected the path of a file or folder")
    with progress.make() as shown, host_locks.acquired(inventory, "provision push"):
        shown.doing(f"reading {source} …")
        data, began = Data(source, posixpath.basename(dest)), time.monotonic()
        with Session(inventory, shown, passwords, command="provision push") as session:
            made = Push(session, data, dest, most)
            made.run()
            done = sum(not each.failed for each in made.targets)
            session.record.exit_code = int(done < len(made.targets))
    seconds = time.monotonic() - began
    if json_:
        about = {"path": dest, "digest": data.digest, "files": data.files, "bytes": data.bytes, "seconds": round(seconds, 1)}
        hosts_ = [{"host": each.host.name, "received": each.came, "problem": each.failed or None} for each in made.targets]
        terminal.print_json({"schema": 1, "ok": done == len(made.targets), **about, "hosts": hosts_})
    elif done:
        what = f"pushed {counted(data.files, 'file')}, {size(data.bytes)} to {counted(done, 'host')}"
        terminal.out().say(f"{what} in {duration(seconds)}: {'' if dest.startswith('/') else '~/'}{dest}")
    if done < len(made.targets):
        raise typer.Exit(1)


def _rate(text: str | None) -> float:
    """``50MB/s`` as bytes a second; 0 without a limit. Raises UsageError."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d+)?) ?([kMG])B(?:/s)?", text or "")
    rate = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if text is not None and rate < 1e5:  # less looks like a host that has stopped
        raise UsageError(f"invalid --rate {text}: expected a rate such as 50MB/s, and at least 100kB/s")
    return rate
