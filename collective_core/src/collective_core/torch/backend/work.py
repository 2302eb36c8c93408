"""Work objects, which collectives of torch.distributed return while they are under way."""

from __future__ import annotations

import atexit
import functools
import queue
import threading
import time
from datetime import timedelta
from functools import partial
from typing import Any, Callable

import torch
import torch.distributed as dist

from collective_core.errors import CollectiveError
from collective_core.runtime.point_to_point import Transfer
from collective_core.torch.compiling import untraced

#: Seconds between looks of one who waits whether another thread has completed it.
LOOK_INTERVAL = 0.2


def for_group(error: CollectiveError) -> CollectiveError:
    """The engine's error, which knows nothing of groups, for somebody who does."""
    if error.kind != "timeout":
        return error
    return CollectiveError(f"{error}, and of this group the timeout given to init_process_group or new_group does", error.kind, error.ranks)


@functools.lru_cache
def _of_tensors() -> Any:
    """Futures of a list of tensors of C++, which DDP's built-in FP16 hook wants; those made in Python are of any object."""
    return torch.jit.CompilationUnit("""
def after(done: Future[int], tensors: List[Tensor]) -> List[Tensor]:
    done.wait()
    return tensors

def give(done: Future[int], tensors: List[Tensor]) -> Future[List[Tensor]]:
    return torch.jit.fork(after, done, tensors)
""")


@untraced
class GroupWork(dist.Work):
    """An operation that ``wait_for`` can wait for, and whose result is brought home by ``finish``, once, by whoever sees its end first.

    ``wait_for(seconds)`` says whether the operation is over, and raises its error. ``tensors``: the result.
    """

    def __init__(
        self,
        completer: Completer,
        name: str,
        wait_for: Callable[[float], bool],
        finish: Callable[[], None],
        tensors: list[torch.Tensor],
    ) -> None:
        super().__init__()
        self._completer, self.name = completer, name
        self._wait_for, self._finish, self._tensors = wait_for, finish, tensors
        self._lock = threading.Lock()
        self._is_over = False
        self._error: Exception | None = None
        self._future: torch.futures.Future[Any] | None = None
        if completer.collected is not None:
            completer.collected[self] = None

    def _complete(self, seconds: float) -> bool:
        """Waits at most so long; says whether it is over."""
        if self._is_over:
            return True
        if not self._lock.acquire(timeout=min(seconds, threading.TIMEOUT_MAX)):
            return self._is_over
        try:
            if not self._is_over:
                try:
                    if not self._wait_for(seconds):
                        return False
                    self._finish()
                    (self._completer.collected or {}).pop(self, None)
                except Exception as error:  # noqa: BLE001 - whoever waits is told, whatever it is
                    self._error = error
                self._is_over = True
        finally:
            self._lock.release()
        if self._future is not None:
            self._resolve()
        return True

    def _resolve(self) -> None:
        with self._lock:
            future, self._future = self._future, None
        if future is None:
            return
        if self._error is None:
            future.set_result(self._tensors)
        else:
            future.set_exception(self._error)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Waits, raises the operation's error. With a timeout above 0 it raises :class:`CollectiveError` (kind ``timeout``) after that."""
        if self._is_over and self._error is None:
            return True
        limit = timeout.total_seconds()
        end = time.monotonic() + limit if limit > 0 else float("inf")
        while not self._complete(min(LOOK_INTERVAL, max(0.0, end - time.monotonic()))):
            if time.monotonic() >= end and not self._give_up(limit):
                raise CollectiveError(f"{self.name} took longer than the {limit:g} s of this wait", "timeout")
        if self._error is not None:
            raise self._error
        return True

    def _give_up(self, _seconds: float) -> bool:
        """Whether it will not go on after a wait of so long."""
        return False

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._complete(0.0)

    def is_success(self) -> bool:
        return self._complete(0.0) and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def get_future(self) -> Any:
        """Completed by a thread of the group, in the order of its operations."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        if self._completer.is_this_thread():
            # In the callback of another future, which may wait for this one.
            while not self._complete(LOOK_INTERVAL):
                pass
        with self._lock:
            if self._future is not None:
                return self._future
            self._future = future
        if self._is_over:
            self._resolve()
        else:
            self._complete_later()
        if self._tensors and all(each.dtype == torch.float16 for each in self._tensors):
            return _of_tensors().give(future.then(lambda done: done.value()), self._tensors)
        return future

    def _complete_later(self) -> None:
        self._completer.put(self)


@untraced
class MessageWork(GroupWork):
    """A message on its way (runtime/point_to_point.py)."""

    def __init__(
        self, completer: Completer, name: str, transfer: Transfer, finish: Callable[[], None], tensors: list[torch.Tensor]
    ) -> None:
        super().__init__(completer, name, transfer.wait, finish, tensors)
        self._transfer = transfer

    def source_rank(self) -> int:
        """From whom it came."""
        return self._transfer.other

    _source_rank = source_rank

    def _give_up(self, seconds: float) -> bool:
        self._transfer.give_up(seconds)
        return self._complete(LOOK_INTERVAL)

    def _complete_later(self) -> None:
        self._transfer.call_when_over(partial(self._completer.put, self))


class Completer:
    """A thread that completes futures, one operation after the other, as those of a process set end in the order in which they began."""

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[GroupWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        #: Those started since _start_coalescing, and not over. After a body that raised nobody calls _end_coalescing.
        self.collected: dict[GroupWork, None] | None = None
        self._is_ending = False

    def is_this_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def put(self, work: GroupWork) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="collective_core futures", daemon=True)
            self._thread.start()
            # PyTorch's destructors abort a process that ends while another thread is in them.
            atexit.register(self.end)
        self._works.put(work)

    def end(self) -> None:
        """Ends the thread. Futures of operations that are not over soon are never completed: whoever calls it ends the operations first."""
        if self._thread is None:
            return
        self._is_ending = True
        self._works.put(None)
        if not self.is_this_thread():
            self._thread.join()
        atexit.unregister(self.end)

    def _run(self) -> None:
        while (work := self._works.get()) is not None:
            while not work._complete(LOOK_INTERVAL) and not self._is_ending:
                pass
            del work
