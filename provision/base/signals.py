"""Signals that end a process: deferred while something is made that must not be lost, ignored during cleanup, or turned into an event.

They are Ctrl-C (SIGINT), SIGTERM and the loss of the terminal (SIGHUP). Those that are ignored anyway, as under `nohup`, stay ignored.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_Handler = Callable[[int, "FrameType | None"], None]


@contextmanager
def deferred() -> Iterator[None]:
    """Let the block finish; a signal that arrives meanwhile takes effect right after it."""
    received: list[int] = []
    with _handled(_ENDING, lambda number, _frame: received.append(number)) as before:
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            if received:
                signal.raise_signal(received[0])


@contextmanager
def ignored() -> Iterator[None]:
    """Ignore them within the block: a second one must not stop the cleanup that the first one started."""
    with _handled(_ENDING, lambda _number, _frame: None):
        yield


@contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP within the block into KeyboardInterrupt, so that they lead to the same cleanup as Ctrl-C."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with _handled((signal.SIGTERM, signal.SIGHUP), interrupt):
        yield


@contextmanager
def as_event() -> Iterator[threading.Event]:
    """Within the block they set the event and do nothing else, so that what was started can be ended in order."""
    event = threading.Event()
    with _handled(_ENDING, lambda _number, _frame: event.set()):
        yield event


@contextmanager
def _handled(numbers: tuple[signal.Signals, ...], handler: _Handler) -> Iterator[dict[signal.Signals, signal.Handlers | _Handler]]:
    """Handle these signals by ``handler`` within the block, except ignored ones; yields the handlers from before.

    Outside the main thread, where Python delivers no signals, it does nothing.
    """
    before: dict[signal.Signals, signal.Handlers | _Handler] = {}
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            previous = signal.getsignal(number)
            if previous != signal.SIG_IGN and previous is not None:
                before[number] = previous  # type: ignore[assignment]
                signal.signal(number, handler)
    try:
        yield before
    finally:
        for number, previous_one in before.items():
            signal.signal(number, previous_one)
