"""Collectives in the callbacks of a framework: in its threads, while the main thread waits for it and runs no handler of a signal.

Python runs handlers in its main thread only, and only between its own instructions: Ctrl-C would wait as long as the callback does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import Iterator

from collective_core.runtime import operations

_reader = -1  # to which Python writes the number of each signal
_is_refused = False  # another part of the program has asked Python for the same


def watch_signals() -> None:
    """Prepares for :func:`in_callback`; to be called in the main thread, elsewhere it does nothing."""
    global _reader, _is_refused
    if _reader >= 0 or _is_refused or threading.current_thread() is not threading.main_thread():
        return
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)
    other = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if other != -1:
        signal.set_wakeup_fd(other)
        os.close(reader)
        os.close(writer)
        _is_refused = True
        return
    _reader = reader


@contextlib.contextmanager
def in_callback() -> Iterator[None]:
    """What waits for a collective here ends with KeyboardInterrupt after Ctrl-C, unless the program handles that signal itself."""
    if _reader < 0 or threading.current_thread() is threading.main_thread():
        yield
        return
    _read_signals()  # those that the main thread has handled
    with operations.watched(_is_interrupted):
        yield


def _is_interrupted() -> bool:
    return signal.SIGINT in _read_signals() and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def _read_signals() -> bytes:
    try:
        return os.read(_reader, 4096)
    except BlockingIOError:
        return b""
