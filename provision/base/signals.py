"""Ctrl-C at the wrong moment: noted, held back while something is made that must not be lost sight of, or ignored while cleaning up.

Being told to end (SIGTERM) and losing the terminal (SIGHUP) count as much, where they have an effect at all: under `nohup` they have none.
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
def held_back() -> Iterator[None]:
    """Lets the block finish; what came meanwhile takes effect right after it."""
    came: list[int] = []
    with _handled(_ENDING, lambda number, _frame: came.append(number)) as before:
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            if came:
                signal.raise_signal(came[0])


@contextmanager
def ignored() -> Iterator[None]:
    """Ignores them within the block: a second one must not stop the cleaning that the first one started."""
    with _handled(_ENDING, lambda _number, _frame: None):
        yield


@contextmanager
def also_when_ended() -> Iterator[None]:
    """Within the block being told to end, or losing the terminal, is a Ctrl-C: what is tidied up after one is tidied up after these."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with _handled((signal.SIGTERM, signal.SIGHUP), interrupt):
        yield


@contextmanager
def noted() -> Iterator[threading.Event]:
    """Within the block they set the event and do nothing else, so that what was started can be ended in order."""
    came = threading.Event()
    with _handled(_ENDING, lambda _number, _frame: came.set()):
        yield came


@contextmanager
def _handled(numbers: tuple[signal.Signals, ...], handler: _Handler) -> Iterator[dict[signal.Signals, signal.Handlers | _Handler]]:
    """Within the block ``handler`` takes these signals, but for those that are ignored anyway; yields who took them before.

    Outside the main thread, where Python delivers no signals, nothing is done.
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
