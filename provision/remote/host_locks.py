"""The locks that keep two controllers of this machine from working on a host at the same time."""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from provision.base import paths, process_locks
from provision.base.errors import ProvisionError
from provision.inventory import Inventory
from provision.remote import ssh


@contextmanager
def acquired(inventory: Inventory, purpose: str) -> Iterator[None]:
    """Acquire the lock of every host of the inventory for the time of the block.

    Raises:
        ProvisionError: another process has one of them; it says who.
    """
    ssh.at_once()  # each is an open file, of which the limit is raised
    with ExitStack() as stack:
        for address, port in sorted({(host.address, host.port or 22) for host in inventory.hosts}):
            name = hashlib.sha256(f"{address}:{port}".encode()).hexdigest()[:16]
            path = paths.home() / "locks" / f"{name}.lock"
            file = stack.enter_context(process_locks.acquired(path))
            if file is None:
                raise _locked(address, path)
            owner = {"pid": os.getpid(), "user": getpass.getuser(), "host": socket.gethostname(), "since": time.time(), "purpose": purpose}
            file.seek(0)
            file.truncate()
            json.dump(owner, file)
            file.flush()
        yield


def _locked(address: str, path: Path) -> ProvisionError:
    try:
        owner = json.loads(path.read_text(encoding="utf-8"))
        since = time.strftime("%H:%M:%S", time.localtime(owner["since"]))
        who = f"{owner['user']} runs `{owner['purpose']}` on it from {owner['host']} since {since} (pid {owner['pid']:d})"
        hint = f"wait until it has ended, or end it: kill {owner['pid']:d}"
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):  # another user may have written it
        who, hint = "another run of provision works on it", "wait until it has ended"
    return ProvisionError(f"locked: {who}", where=address, hint=hint)
