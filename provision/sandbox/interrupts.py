"""Ctrl-C at the wrong moment: held back while the engine makes something that must not be lost sight of, ignored while cleaning up."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_back() -> Iterator[None]:
    """Lets the block finish; a Ctrl-C that came meanwhile takes effect right after it.

    Does nothing outside the main thread, where Python delivers no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            if callable(before):
                before(*came[0])
            elif before == signal.SIG_DFL:
                raise KeyboardInterrupt


@contextmanager
def ignored() -> Iterator[None]:
    """Ignores Ctrl-C within the block: a second one must not stop the cleaning that the first one started."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def also_when_ended() -> Iterator[None]:
    """Within the block being told to end, or losing the terminal, is a Ctrl-C: what is tidied up after one is tidied up after these."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
