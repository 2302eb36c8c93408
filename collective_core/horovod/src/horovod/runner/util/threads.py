"""Threads in the background."""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Callable

__path__: list[str] = []  # so that names that are missing here are looked for, and refused, as modules


def in_thread(
    target: Callable[..., Any], args: tuple[Any, ...] = (), name: str | None = None, daemon: bool = True, silent: bool = False
) -> threading.Thread:
    """A thread, started, that calls ``target``; ``silent``: without its exceptions. Raises ValueError for ``args`` that are not a tuple."""
    if not isinstance(args, tuple):
        raise ValueError(f"invalid args {args!r}: expected a tuple")

    def call() -> None:
        with contextlib.suppress(*[Exception] if silent else []):
            target(*args)

    thread = threading.Thread(target=call, name=name, daemon=daemon)
    thread.start()
    return thread
