"""What the engine asks of NCCL once all ranks have agreed: its calls, put on the GPU's stream.

All ranks put the same on their streams, in the same order. Where NCCL may have to connect to other ranks first, which waits for them, a
thread of its own does it, so that a rank that dies meanwhile is noticed: for the communicator, the first use of a function of NCCL with
so much data, and the first rows for a rank. While a GPU is at work, another thread sees to it (nccl_watchdog.py). When the engine has
failed, communicators are aborted.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from typing import Any

import torch

from collective_core import _native
from collective_core.errors import CollectiveError
from collective_core.runtime import membership
from collective_core.torch import nccl_watchdog
from collective_core.transport import nccl, nccl_calls
from collective_core.transport.nccl_calls import Agreed

#: Seconds for which an abort waits for what is being put on the stream. Beyond that it is NCCL itself that waits there for a rank.
ABORT_PATIENCE = 5.0
_NAMES = {number: name for name, number in _native.DTYPES.items()}
_tags = itertools.count(1)


class Launch:
    """An operation that was asked for: its tensors on the GPU, and the events around it.

    ``target`` None: it is made when all have agreed how many rows there are, in memory of the stream's own.
    """

    def __init__(self, source: torch.Tensor, target: torch.Tensor | None, prescale: float = 1.0, postscale: float = 1.0) -> None:
        self.source, self.target, self.prescale, self.postscale = source, target, prescale, postscale
        self.ready, self.done = torch.cuda.Event(), torch.cuda.Event()
        self.ready.record(torch.cuda.current_stream(source.device))
        self.tag = next(_tags) % (1 << 31) or next(_tags) % (1 << 31)
        self.is_under_way = False  # never becomes so where there is nothing to move

    def hand_over(self) -> torch.Tensor | None:
        """The target, for use on the caller's stream, which waits for it."""
        if self.target is not None and self.is_under_way:
            stream = torch.cuda.current_stream(self.source.device)
            stream.wait_event(self.done)
            self.target.record_stream(stream)
        return self.target


class Set:
    """A process set whose members use NCCL."""

    def __init__(self, number: int, unique_id: bytes, size: int, rank: int) -> None:
        self.number, self.unique_id, self.size, self.rank = number, unique_id, size, rank
        self.communicator = 0
        self.device: torch.device | None = None
        self.stream: Any = None
        # What the callers asked for, by its tag. They hold it for as long as they need it, which ends when it failed.
        self.asked: weakref.WeakValueDictionary[int, Launch] = weakref.WeakValueDictionary()
        self.compared = False
        self.connected: set[tuple[str, int]] = set()  # of nccl_calls.routes
        self.connecting: threading.Thread | None = None
        self.problem = ""
        self.broken = ""  # why it can never be used again
        self.lock = threading.Lock()  # of `broken` and `communicator`: neither changes while something is put on the stream

    def join(self, library: nccl.Library) -> None:
        """Joins the communicator. Waits for the other ranks, and therefore not under the lock."""
        self.stream = torch.cuda.Stream(self.device)
        made = library.communicator(self.size, self.unique_id, self.rank)
        with self.lock:
            if not self.broken:
                self.communicator = made
                return
        library.abort(made)

    def retire(self, reason: str) -> int:
        """Nothing more is put on its stream. Returns the communicator, which the caller has to end; 0 if there is none."""
        taken = self.lock.acquire(timeout=ABORT_PATIENCE)
        try:
            self.broken = reason
            communicator, self.communicator = self.communicator, 0
            return communicator
        finally:
            if taken:
                self.lock.release()


sets: dict[int, Set] = {}


def start(transfer: Any, error: int, capacity: int) -> int:
    """The engine's call, when all ranks have agreed."""
    try:
        own = sets[transfer.contents.process_set]
        asked = nccl_calls.agreed(transfer.contents, own.size)
        calls = nccl_calls.calls(asked)
        own.problem = own.broken
        if own.broken:
            return 0
        if own.communicator and nccl_calls.routes(calls) <= own.connected:
            _launch(own, asked, calls)
        else:
            own.connecting = threading.Thread(target=_launch, args=(own, asked, calls), daemon=True)
            own.connecting.start()
    except BaseException as failure:  # noqa: BLE001 - nothing may cross the C interface
        return _native.say(failure, error, capacity)
    return 0


def test(process_set: int, error: int, capacity: int) -> int:
    """The engine's question whether it is under way."""
    try:
        own = sets[process_set]
        if own.connecting is not None:
            own.connecting.join(0.001)
            if own.connecting.is_alive():
                return 0
            own.connecting = None
        return _native.say(own.problem, error, capacity) if own.problem else 1
    except BaseException as failure:  # noqa: BLE001 - nothing may cross the C interface
        return _native.say(failure, error, capacity)


def _launch(own: Set, asked: Agreed, calls: list[nccl.Call]) -> None:
    try:
        library = nccl.library()
        if library is None:
            raise RuntimeError("NCCL was switched off while it was in use")
        launch = own.asked.pop(asked.tag) if asked.tag else None  # a rank that has joined has asked for nothing
        if own.device is None:
            own.device = launch.source.device if launch else torch.device("cuda", torch.cuda.current_device())
        if launch and launch.source.device != own.device:
            raise RuntimeError(f"a rank uses one GPU: this one has used {own.device}, and now {launch.source.device}")
        with torch.cuda.device(own.device):
            if not own.communicator and not own.broken:
                own.join(library)
            with own.lock:
                if own.broken:
                    raise RuntimeError(own.broken)
                with torch.cuda.stream(own.stream):
                    _put_on_stream(library, own, asked, calls, launch)
                    end = torch.cuda.Event()
                    end.record(own.stream)
        own.connected |= nccl_calls.routes(calls)
        nccl_watchdog.see_to(own.number, end)
    except Exception as failure:  # noqa: BLE001 - the engine tells all ranks
        own.problem = f"{failure}; without COLLECTIVE_NCCL CUDA tensors go through host memory"


def _put_on_stream(library: nccl.Library, own: Set, asked: Agreed, calls: list[nccl.Call], launch: Launch | None) -> None:
    """With the stream as PyTorch's current one, so that what is allocated here is the stream's own memory."""
    before = after = 1.0
    if launch is None:
        source, target = _stand_ins(own, asked)
    else:
        before, after = nccl_calls.factors(asked, launch.prescale, launch.postscale)
        own.stream.wait_event(launch.ready)
        source = launch.source
        if launch.target is None:
            launch.target = source.new_empty((sum(asked.received), *source.shape[1:]))
        target = launch.target
        # PyTorch gives memory back when the caller lets go of it; the stream may still be at work on it then.
        source.record_stream(own.stream)
        target.record_stream(own.stream)
        if before != 1.0:
            source = source * before
    library.put(calls, source.data_ptr(), target.data_ptr(), own.communicator, own.stream.cuda_stream)
    if launch is not None:
        if after != 1.0:
            with torch.inference_mode(target.is_inference()):  # the caller's own mode is its thread's, not this one's
                target.mul_(after)
        launch.done.record(own.stream)
        launch.is_under_way = True


def _stand_ins(own: Set, asked: Agreed) -> tuple[torch.Tensor, torch.Tensor]:
    """What a rank that has joined takes part with: nothing that counts, and memory for what it must receive."""
    if asked.kind == _native.ALLREDUCE:
        identity = _identity(asked, own.device)
        return identity, identity
    received = torch.empty(nccl_calls.received_bytes(asked, own.rank), dtype=torch.uint8, device=own.device)
    return (_identity(asked, own.device) if asked.kind == _native.REDUCESCATTER else received), received


def _identity(asked: Agreed, device: torch.device | None) -> torch.Tensor:
    dtype = getattr(torch, _NAMES[asked.dtype])
    if dtype.is_floating_point:
        most, least = float("inf"), float("-inf")
    else:
        most, least = torch.iinfo(dtype).max, torch.iinfo(dtype).min
    neutral = {nccl.SUM: 0, nccl.PRODUCT: 1, nccl.MIN: most, nccl.MAX: least}
    return torch.full((asked.count,), neutral[nccl_calls.REDUCTIONS[asked.reduce]], dtype=dtype, device=device)


def _abort() -> None:
    """After a failure: nothing on this GPU may wait for other ranks any more."""
    library = nccl.library()
    for own in list(sets.values()):
        communicator = own.retire("its communicator was aborted after a failure")
        if communicator and library is not None:
            try:
                library.abort(communicator)
            except CollectiveError as error:
                print(f"collective_core: what is under way on a GPU could not be ended: {error}", file=sys.stderr, flush=True)


membership.after_failure.append(_abort)
