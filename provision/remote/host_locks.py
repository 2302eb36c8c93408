"""One controller at a time per host: locks of this machine, one for each host that a run works on."""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from provision.base import paths
from provision.base.errors import ProvisionError
from provision.base.process_locks import acquired
from provision.inventory import Inventory


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
        who = f"{owner['user']} runs `{owner['purpose']}` on it from {owner['host']} since {since} (pid {owner['pid']:d})"
        hint = f"wait until it has ended, or end it: kill {owner['pid']:d}"
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):  # another user may have written it
        who, hint = "another run of provision works on it", "wait until it has ended"
    return ProvisionError(f"locked: {who}", where=address, hint=hint)
