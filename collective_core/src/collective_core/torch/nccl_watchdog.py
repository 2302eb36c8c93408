"""While a GPU is at work on a collective: sees that the other ranks live, and that it ends.

NCCL itself would wait for a dead rank for ever, and with it the program, at the next look at a result. So a thread asks the engine now and
then whether all ranks live. Where one does not, or the GPU takes longer than COLLECTIVE_TIMEOUT, the failure is noted, and whoever has to
do something then (``membership.after_failure``) does it.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

from collective_core import _native
from collective_core.errors import CollectiveError
from collective_core.runtime import membership

#: Seconds between looks at the other ranks.
INTERVAL = 0.1

_turn = threading.Lock()  # of what follows
_last: dict[int, tuple[float, Any]] = {}  # by process set, what was put on its stream last: when, and the event at its end
_watcher: threading.Thread | None = None  # while a GPU is at work


def see_to(process_set: int, end: Any) -> None:
    """Has what ends with this event watched."""
    global _watcher
    with _turn:
        _last[process_set] = time.monotonic(), end
        if _watcher is None:
            _watcher = threading.Thread(target=_watch, name="collective_core gpu", daemon=True)
            _watcher.start()


def finish() -> None:
    """Waits until GPUs have done what was put on their streams, or a failure has ended it."""
    with _turn:
        ends = [end for _, end in _last.values()]
    while membership.failure() is None and not all(end.query() for end in ends):
        time.sleep(0.001)


def forget(process_set: int) -> None:
    """What was under way for the set is nobody's any more."""
    with _turn:
        _last.pop(process_set, None)


def _busy() -> list[tuple[int, float]]:
    """The sets for which the GPU is at work, and since when; the watcher's end if there are none."""
    global _watcher
    with _turn:
        busy = [(number, since) for number, (since, end) in _last.items() if not end.query()]
        if not busy:
            _watcher = None
        return busy


def _watch() -> None:
    global _watcher
    try:
        while True:
            time.sleep(INTERVAL)
            busy = _busy()
            if not busy:
                return
            for number, since in busy:
                _native.check_peers(number)
                if time.monotonic() - since > membership.current().config.timeout:
                    raise CollectiveError("a GPU has not finished a collective within the time that COLLECTIVE_TIMEOUT sets", "timeout")
    except RuntimeError as failure:  # ours, or CUDA's at a look at the event
        error = failure if isinstance(failure, CollectiveError) else CollectiveError(f"a GPU failed: {failure}", "internal")
        if error.kind != "closed":  # the program has left the job
            print(f"collective_core: operations on GPUs are ended: {error}", file=sys.stderr, flush=True)
            membership.note_failure(error)
    finally:
        with _turn:
            if _watcher is threading.current_thread():
                _watcher = None
