"""Locks between processes of this machine. The kernel releases them when their holder dies, however it dies."""

from __future__ import annotations

import fcntl
import getpass
import hashlib
import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import IO

from provision import paths
from provision.errors import ProvisionError
from provision.inventory import Inventory

_POLL_S = 0.2


@contextmanager
def acquired(path: Path, wait: float = 0) -> Iterator[IO[str] | None]:
    """Acquire the lock for the time of the block.

    Args:
        path: the lock's file, the same for all who must not meet; it stays when the lock is released.
        wait: seconds to wait for another holder.

    Yields:
        The file, in which a holder may say who it is, or None where another process kept the lock.

    Raises:
        ProvisionError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
    except OSError as failure:
        todo = "make its folder writable, or name another one: PROVISION_HOME, PROVISION_CACHE"
        raise ProvisionError(f"the lock cannot be written: {failure.strerror}", where=str(path), todo=todo) from failure
    with file:
        yield file if _take(file, time.monotonic() + wait) else None


def _take(file: IO[str], deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)


def every_host(inventory: Inventory, purpose: str) -> AbstractContextManager[None]:
    """The lock of every host of the inventory, for ``with``."""
    return hosts(paths.home() / "locks", [(host.address, host.port or 22) for host in inventory.hosts], purpose)


@contextmanager
def hosts(folder: Path, addresses: Sequence[tuple[str, int]], purpose: str) -> Iterator[None]:
    """Acquire the lock of every host (address, port) for the time of the block; raises ProvisionError that says who has one of them."""
    with ExitStack() as stack:
        for address, port in sorted(set(addresses)):
            path = folder / f"{hashlib.sha256(f'{address}:{port}'.encode()).hexdigest()[:16]}.lock"
            file = stack.enter_context(acquired(path))
            if file is None:
                raise _held(address, path)
            file.seek(0)
            file.truncate()
            json.dump(
                {"pid": os.getpid(), "user": getpass.getuser(), "host": socket.gethostname(), "since": time.time(), "purpose": purpose},
                file,
            )
            file.flush()
        yield


def _held(address: str, path: Path) -> ProvisionError:
    try:
        owner = json.loads(path.read_text(encoding="utf-8"))
        since = time.strftime("%H:%M:%S", time.localtime(owner["since"]))
        who = f"{owner['user']} runs `{owner['purpose']}` on it from {owner['host']} since {since} (pid {owner['pid']})"
        todo = f"wait until it has ended, or end it: kill {owner['pid']}"
    except (OSError, ValueError, KeyError):
        who, todo = "another run of provision works on it", "wait until it has ended"
    return ProvisionError(f"locked: {who}", where=address, todo=todo)
