"""Queue in which the frames of all ranks arrive. It holds a limited number: ranks that print faster than we show wait in their print."""

from __future__ import annotations

import contextlib
import queue
import threading

from collective_core.launch.frames import Frame

MAX_FRAMES = 4096
#: Seconds between looks whether anybody still reads.
INTERVAL = 0.2


class Mailbox:
    """A queue that can be closed: then what still comes is dropped and nobody waits to put something in."""

    def __init__(self) -> None:
        self._frames: queue.Queue[Frame] = queue.Queue(MAX_FRAMES)
        self._closed = threading.Event()

    def put(self, frame: Frame) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                self._frames.put(frame, timeout=INTERVAL)
                return

    def get(self, timeout: float | None = None) -> Frame | None:
        """The next frame, or None after so many seconds without one."""
        try:
            return self._frames.get(timeout=timeout)
        except queue.Empty:
            return None

    def close(self) -> None:
        self._closed.set()
