"""One at a time: locks between processes. The kernel lets go of them when their holder dies, however it dies."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from provision import paths
from provision.errors import ProvisionError


@contextmanager
def held(name: str, wait: float) -> Iterator[bool]:
    """Holds the lock called ``name`` during the block.

    Args:
        name: of the lock, the same for all who must not meet.
        wait: seconds to wait for another holder.

    Yields:
        True when the lock is held, False when another process kept it.

    Raises:
        ProvisionError: the state folder cannot be written.
    """
    folder = paths.cache() / "locks"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as failure:
        raise ProvisionError(f"The folder for locks cannot be written: {failure.strerror}.", where=str(folder)) from failure
    try:
        yield _take(handle, time.monotonic() + wait)
    finally:
        os.close(handle)


def _take(handle: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.2)
