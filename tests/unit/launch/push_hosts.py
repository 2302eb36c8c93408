"""Hosts of `provision push` that are folders of this machine: ssh, here and between them, is a script that sets HOME."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from provision.inventory import Inventory, load
from provision.launch.push import Data, Push
from provision.remote.progress import Progress
from provision.remote.session import Session

#: A host is down where its home has a file of that name; ``flaky`` loses one login; the program ``liar`` is what gives its pieces.
_SSH = """#!/bin/sh
for word; do host=$command; command=$word; done
export HOME="{homes}/$host"
[ ! -e "$HOME/down" ] || { echo "ssh: connect to host $host port 22: No route to host" >&2; exit 255; }
case $command in *" take'"*) [ ! -e "$HOME/flaky" ] || { rm "$HOME/flaky"; echo "Connection reset by peer" >&2; exit 255; };; esac
case $command in *" give "*) [ ! -e "$HOME/liar" ] || command="python3 $HOME/liar";; esac
echo Welcome
exec sh -c "exec $command"
"""


class Hosts:
    """Folders ``n1``, ``n2`` …, on which `provision up` seems to have run."""

    def __init__(self, folder: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.homes = folder / "homes"
        for number in range(1, count + 1):
            (self.homes / f"n{number}/.ssh").mkdir(parents=True)
            (self.homes / f"n{number}/.provision-record.json").write_text("{}")
            (self.homes / f"n{number}/.ssh/provision_config").touch()
        ssh = folder / "bin/ssh"
        ssh.parent.mkdir()
        ssh.write_text(_SSH.replace("{homes}", str(self.homes)))
        ssh.chmod(0o755)
        monkeypatch.setenv("PATH", f"{ssh.parent}:{os.environ['PATH']}")
        self.inventory: Inventory = load(",".join(f"n{number}" for number in range(1, count + 1)))
        self.names = [host.name for host in self.inventory.hosts]

    def home(self, name: str) -> Path:
        return self.homes / name

    def push(self, source: Path, to: str | None = None, rate: float = 0.0, during: Callable[[Push], object] = lambda _: None) -> Push:
        """A push as the command line makes it; ``during`` runs meanwhile."""
        dest = to or f"provision-data/{source.name}"
        with Progress() as shown, Session(self.inventory, shown, command="provision push") as session, ThreadPoolExecutor(1) as pool:
            made = Push(session, Data(source, os.path.basename(dest)), dest, rate)
            disturbing = pool.submit(during, made)
            made.run()
            disturbing.result()
        return made

    def processes(self, name: str = "", what: bytes = b"take") -> list[int]:
        """The relays of a host, or of all of them."""
        found = []
        mark = f"HOME={self.homes}/{name}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (folder / "cmdline").read_bytes().split(b"\0")
                variables = (folder / "environ").read_bytes().split(b"\0")
                if what in words and any(each.startswith(mark) and (not name or each == mark) for each in variables):
                    found.append(int(folder.name))
        return found

    def end_soon(self) -> bool:
        """Whether nothing of a push is left running, or is on the way out."""
        deadline = time.monotonic() + 10
        while (left := self.processes() + self.processes(what=b"give")) and time.monotonic() < deadline:
            time.sleep(0.1)
        return not left
