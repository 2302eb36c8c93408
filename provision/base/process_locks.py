"""Locks between processes of this machine. The kernel releases them when the process ends, however it ends."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from provision.base.errors import ProvisionError

_POLL_S = 0.2


@contextmanager
def acquired(path: Path, wait: float = 0) -> Iterator[IO[str] | None]:
    """Acquire the lock for the time of the block.

    Args:
        path: the lock's file; it stays when the lock is released.
        wait: seconds to wait for another process.

    Yields:
        The file, in which a process can write who it is, or None where another process kept the lock.

    Raises:
        ProvisionError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+", encoding="utf-8")
        is_ours = _take(file, time.monotonic() + wait)
    except OSError as failure:
        hint = "make its folder writable, or name another one: PROVISION_HOME, PROVISION_CACHE"
        raise ProvisionError(f"the lock cannot be written: {failure.strerror}", where=str(path), hint=hint) from failure
    with file:
        yield file if is_ours else None


def is_held(path: Path) -> bool:
    """Whether a process holds this lock. A file that is missing or cannot be read is held by no known process; none is created."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)) as file:  # a FIFO would keep us waiting
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _take(file: IO[str], deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
