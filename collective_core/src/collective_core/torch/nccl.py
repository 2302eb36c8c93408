"""PyTorch's ``ProcessGroupNCCL`` as the engine's transport of CUDA tensors: one per process set.

The engine agrees on an operation as on every other and then asks here for the transfer, in the same order on all ranks. Its calls are put
on a stream next to the program's (:class:`Cuda`), and the engine has done its part when they are there: the host does not wait for the GPU,
unless it is far ahead.

NCCL would wait for a dead rank for ever. So while a GPU is at work a thread asks the engine now and then whether all ranks live. When one
does not, or the GPU takes longer than COLLECTIVE_TIMEOUT or ten minutes, the failure is noted and all communicators are aborted. PyTorch's
own watchdog, which ends the process then, is off for these groups.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import sys
import threading
import time
import weakref
from collections import deque
from datetime import timedelta
from typing import Any, Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from collective_core import _native
from collective_core.errors import CollectiveError
from collective_core.runtime import membership, process_sets
from collective_core.runtime.process_sets import Members

#: Seconds between looks at the other ranks, and at what there is to relay between them while a group is being made.
INTERVAL, RELAY_INTERVAL = 0.1, 0.005
#: Seconds for which a call that has failed is not blamed: a rank's death may be the reason, and the engine, which looks then, names it.
BLAME_AFTER = 3.0
#: Seconds for which a GPU may work on a collective, as torch.distributed's; and how many it may have to do.
HUNG_AFTER, MAX_IN_FLIGHT = 600.0, 64
#: Variables of ProcessGroupNCCL.hpp that are 0 for these groups: the engine, not PyTorch, sees to their failures. PyTorch's watchdog
#: neither ends the process, nor writes dumps, nor waits for those of others. PyTorch 2.2 renamed the first two.
SETTINGS = [("TORCH_NCCL_" if torch.__version__ >= (2, 2) else "NCCL_") + name for name in ("ASYNC_ERROR_HANDLING", "BLOCKING_WAIT")]
SETTINGS += [
    "TORCH_NCCL_ENABLE_MONITORING",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
]
#: Seconds for a communicator to end what it has under way.
ABORT_TIME = 30.0
#: Of cc_test (c_api.h).
WAITS_FOR_TURN = 2
#: The engine's deadline is the one that counts.
NO_TIMEOUT = timedelta(days=365)
#: CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: only graphs that this thread itself captures restrict what it may call.
THREAD_LOCAL = 1
#: Element types that NCCL reduces. What is only moved goes as bytes.
REDUCED = (torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)
HALF = (torch.float16, torch.bfloat16)
_DTYPES = {number: getattr(torch, name) for name, number in _native.DTYPES.items() if hasattr(torch, name)}
_REDUCTIONS = {
    _native.SUM: "SUM",
    _native.AVERAGE: "SUM",  # the division is ours: ranks that have joined do not count
    _native.PRODUCT: "PRODUCT",
    _native.MIN: "MIN",
    _native.MAX: "MAX",
}
_Store: Any = dist.Store if dist.is_available() else object


class Cuda:
    """Functions of CUDA and NCCL that this package needs. A test puts another one in its place, ``nccl.platform``."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is a GPU's."""
        return bool(tensor.is_cuda)

    def unsupported_reason(self) -> str:
        """Why this process cannot use NCCL; empty if it can."""
        if not dist.is_available() or not dist.is_nccl_available():
            return "its PyTorch has no NCCL"
        return "" if torch.cuda.is_available() else "it has no GPU"

    def version(self) -> Sequence[int]:
        """NCCL's, as (2, 20, 5)."""
        found: Sequence[int] = torch.cuda.nccl.version()
        return found

    def identity(self, device: torch.device) -> str:
        """A name that no other GPU has; empty where PyTorch does not tell."""
        return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))

    def backend(self, store: dist.Store, rank: int, size: int) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = NO_TIMEOUT
        before = {name: os.environ.get(name) for name in SETTINGS}
        os.environ.update(dict.fromkeys(SETTINGS, "0"))
        try:
            return dist.ProcessGroupNCCL(store, rank, size, options)
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value

    def event(self, device: torch.device) -> Any:
        """After all that was put on the current stream: ``query``, ``synchronize``, ``wait`` (for the stream that is current then)."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return event

    def is_done(self, event: Any) -> bool:
        """Whether the GPU has come to it. Asked in the usual way, this would end the capture of a CUDA graph by another thread."""
        before = _exchange_capture_mode(THREAD_LOCAL)
        try:
            return bool(event.query())
        finally:
            _exchange_capture_mode(before)

    def wait(self, event: Any, device: torch.device) -> None:
        """Has the device's current stream, which need not be that of the current device, wait for the event."""
        event.wait(torch.cuda.current_stream(device))

    @contextlib.contextmanager
    def stream(self, stream: Any, after: Any = None) -> Iterator[None]:
        """Makes the stream current, behind an event."""
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            if after is not None:
                stream.wait_event(after)
            yield

    def new_stream(self, device: torch.device) -> Any:
        return torch.cuda.Stream(device)

    def end_of(self, works: Sequence[Any], device: torch.device) -> Any:
        """An event after these works of a process group, which the current stream then waits for."""
        for work in works:
            work.wait()
        return self.event(device)

    def keep(self, tensor: torch.Tensor) -> None:
        """The current stream uses memory of a tensor that another one may have allocated."""
        tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def synchronize(self, device: torch.device | None = None) -> None:
        """Waits for the GPU; raises RuntimeError where it has failed."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize(device)

    def host_memory(self, like: torch.Tensor) -> torch.Tensor:
        """Pinned, contiguous, uninitialised."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)


platform = Cuda()


@functools.lru_cache(maxsize=None)
def _capture_mode_call() -> Any:
    try:
        if torch.version.hip:  # PyTorch for AMD's GPUs: of the libraries that it has loaded
            return ctypes.CDLL(torch._C.__file__).hipThreadExchangeStreamCaptureMode
        return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError) as error:
        raise RuntimeError(f"the library of the GPU's driver cannot be used: {error}") from error


def _exchange_capture_mode(mode: int) -> int:
    """Sets which CUDA graphs being captured restrict what this thread may call, a CUstreamCaptureMode; returns what was set before.

    PyTorch has no call for it. The driver's, unlike CUDA's own, makes no context on the first GPU. Raises RuntimeError.
    """
    exchanged = ctypes.c_int(mode)
    code = _capture_mode_call()(ctypes.byref(exchanged))
    if code != 0:
        raise RuntimeError(f"{_capture_mode_call().__name__} failed with error {code}")
    return exchanged.value


def _rows(counts: Any, size: int) -> list[int]:
    """Of a transfer: rows for each rank or from each; empty where they mean nothing."""
    return list(counts[:size]) if counts else []


class Order:
    """One order of what all process sets launch on GPUs, the same on all ranks, so that no two GPUs wait for each other's.

    It follows numbers: each rank of a set proposes one higher than all that it has seen, and the highest counts (Skeen). What has the
    lowest goes first. A proposal, which may become higher, holds up what is behind it; no rank's program is waited for meanwhile.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._highest = 0
        self._waiting: dict[int, int] = {}  # by process set

    def enter(self, process_set: int, agreed: int = 0) -> int:
        """With the number that all have agreed on, or as a proposal, which is returned."""
        with self._turn:
            number = agreed or self._highest + 1
            self._highest = max(self._highest, number)
            self._waiting[process_set] = number
            return number

    def is_next(self, process_set: int) -> bool:
        with self._turn:
            return min(self._waiting, key=lambda each: (self._waiting[each], each), default=process_set) == process_set

    def leave(self, process_set: int) -> None:
        """It has been launched, or never will be."""
        with self._turn:
            self._waiting.pop(process_set, None)

    def clear(self) -> None:
        with self._turn:
            self._waiting.clear()


order = Order()
_tags = itertools.count(1)


class Launch:
    """An operation that was asked for: its tensors on the GPU, contiguous, and the event behind which they may be used.

    ``source``: ours to change, unless nothing is scaled and it is only moved. ``target``: may be the source; None where it is made when all
    have agreed how many rows there are.
    """

    def __init__(self, source: torch.Tensor, target: torch.Tensor | None, prescale: float = 1.0, postscale: float = 1.0) -> None:
        self.source, self.target, self.prescale, self.postscale = source, target, prescale, postscale
        self.ready = platform.event(source.device)
        self.tag = next(_tags) % (1 << 31) or next(_tags) % (1 << 31)
        self.group: Group | None = None
        self.end: Any = None  # stays so where there is nothing to move
        self._afterwards: list[Callable[[], Any]] = []

    def afterwards(self, action: Callable[[], Any]) -> None:
        """Has this done on the caller's stream behind the end."""
        self._afterwards.append(action)

    def hand_over(self) -> torch.Tensor | None:
        """The target, for use on the caller's stream, which waits for it. Raises :class:`CollectiveError`."""
        if self.end is not None and self.group is not None:
            try:
                self.group.refuse_if_broken()
                platform.wait(self.end, self.source.device)
            except RuntimeError as error:
                raise _reason(error, self.group.number) from None
            if self.target is not None:
                platform.keep(self.target)
            if self._afterwards:
                platform.keep(self.source)  # they may read it
            with torch.no_grad():
                for action in self._afterwards:
                    action()
        return self.target


class Relay(_Store):  # PyTorch may have none
    """The store in which the ranks of a process group find each other: the engine carries what they tell (:func:`connect`).

    So whoever is there has proven that it belongs to the job.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[str, bytes] = {}
        self._untold: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._closed = ""

    def take_untold(self) -> dict[str, bytes]:
        with self._changed:
            untold, self._untold = self._untold, {}
            return untold

    def learn(self, told: dict[str, bytes]) -> None:
        with self._changed:
            self._known.update(told)
            self._changed.notify_all()

    def close(self, reason: str) -> None:
        """Nobody waits here any more."""
        with self._changed:
            self._closed = reason
            self._changed.notify_all()

    # What PyTorch calls.

    def set(self, key: str, value: Any) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        with self._changed:
            self._known[key] = self._untold[key] = data
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._known[key]

    def check(self, keys: Sequence[str]) -> bool:
        with self._changed:
            return all(key in self._known for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # noqa: ARG002 - the engine has its own
        with self._changed:
            self._changed.wait_for(lambda: self._closed or all(key in self._known for key in keys))
            if self._closed:
                raise RuntimeError(self._closed)

    def set_timeout(self, timeout: timedelta) -> None:
        """It is the engine that ends a wait."""


class Group:
    """A process set whose CUDA tensors go through NCCL."""

    def __init__(self, members: Members, device: torch.device) -> None:
        self.number, self.rank, self.size, self.device = members.id, members.rank, members.size, device
        # One for all sets, whose operations so run one after the other.
        others = [each for each in list(groups.values()) if each.device == device]  # a list: another set may come or go meanwhile
        self.stream: Any = others[0].stream if others else platform.new_stream(device)
        self.backend: Any = None
        self._store: Relay | None = None  # PyTorch uses it as long as the backend, and keeps only a part of it
        # What the callers asked for, by its tag. They hold it for as long as they need it, which ends when it failed.
        self.asked: weakref.WeakValueDictionary[int, Launch] = weakref.WeakValueDictionary()
        self.waiting: _native.Transfer | None = None  # not launched yet: others go first
        self.broken = ""  # why it can never be used again
        self._turn = threading.Lock()  # of `broken` and of what is under way
        self._problem: tuple[float, str] | None = None  # since when the latest transfer has failed
        self._calling: float | None = None  # since when a call has been under way, which may wait for other ranks
        self._under_way: deque[tuple[float, Any]] = deque()  # what the GPU has to do: since when, and the event at its end

    def make(self, store: Relay) -> None:
        """Connects to the other ranks, and tries it: NCCL connects at the first use."""
        self._store = store
        self.backend = platform.backend(store, self.rank, self.size)
        one = torch.ones(1, device=self.device)
        with platform.stream(self.stream, platform.event(self.device)):
            platform.end_of([self.backend.allreduce([one])], self.device).synchronize()
        if one.item() != self.size:
            raise RuntimeError(f"the sum of {self.size} ones is {one.item():g}")

    def refuse_if_broken(self) -> None:
        """Raises what has broken it: what an aborted operation leaves is nobody's result."""
        if self.broken:
            raise membership.failure() or CollectiveError(self.broken, "closed")

    # --- the engine's calls

    def start(self, transfer: _native.Transfer) -> None:
        self._problem, self.waiting = None, transfer
        if transfer.order:
            order.enter(self.number, transfer.order)
        self._launch_in_turn(transfer)

    def _launch_in_turn(self, transfer: _native.Transfer) -> None:
        if transfer.order and not self.broken and not order.is_next(self.number):
            return
        self.waiting = None
        try:
            self.refuse_if_broken()
            self._calling = time.monotonic()
            _watch()
            launch = self.asked.pop(transfer.tag) if transfer.tag else self._stand_in(transfer)
            launch.group = self
            with platform.stream(self.stream, launch.ready), torch.inference_mode(launch.source.is_inference()):
                launch.end = platform.end_of(self._call(transfer, launch), self.device)
            self._under_way.append((self._calling, launch.end))
        except Exception as failure:  # noqa: BLE001 - the engine tells all ranks
            self._problem = time.monotonic(), f"{failure}; with COLLECTIVE_NCCL=off CUDA tensors go through host memory"
        finally:
            self._calling = None
            if transfer.order:
                order.leave(self.number)

    def test(self) -> str | None:
        """Why the latest transfer has failed; empty if it is under way, None if a reason or a GPU far behind is to be waited for."""
        if self.waiting is not None:
            self._launch_in_turn(self.waiting)
        if len(self._under_way) > MAX_IN_FLIGHT:
            self.busy_since()  # lets go of what is done
        if self.waiting is None and self._problem is None and (self.broken or len(self._under_way) <= MAX_IN_FLIGHT):
            return ""
        if self._problem is not None and time.monotonic() - self._problem[0] > BLAME_AFTER:
            return self._problem[1]
        time.sleep(0.001)
        return None

    def _call(self, transfer: _native.Transfer, launch: Launch) -> list[Any]:
        """Puts the operation on the current stream."""
        before, after = _factors(transfer, launch.prescale, launch.postscale)
        source, target = launch.source, launch.target
        sent, received = _rows(transfer.sent, self.size), _rows(transfer.received, self.size)
        if target is None:
            target = launch.target = source.new_empty((sum(received), *source.shape[1:]))
        platform.keep(source)
        platform.keep(target)
        if before != 1.0:
            source.mul_(before)
        if transfer.kind == _native.ALLREDUCE:
            works = [self._allreduce(source, transfer)]
        elif transfer.kind == _native.BROADCAST:
            works = [self._broadcast(_bytes(target), transfer.root)]
        elif transfer.kind == _native.REDUCESCATTER:
            works = [self._reducescatter(source.view(-1), target.view(-1), transfer, sent, launch)]
        elif transfer.kind == _native.ALLGATHER:
            works = self._allgather(_bytes(source), _bytes(target), [rows * transfer.row_bytes for rows in received])
        else:
            sizes = [[rows * transfer.row_bytes for rows in part] for part in (received, sent)]
            works = [self.backend.alltoall_base(_bytes(target), _bytes(source), *sizes)]
        if after != 1.0:
            launch.afterwards(lambda: target.mul_(after))
        return works

    def _allreduce(self, tensor: torch.Tensor, transfer: _native.Transfer) -> Any:
        options = dist.AllreduceOptions()
        options.reduceOp = getattr(dist.ReduceOp, _REDUCTIONS[transfer.reduce])
        return self.backend.allreduce([tensor], options)

    def _broadcast(self, tensor: torch.Tensor, root: int) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        return self.backend.broadcast([tensor], options)

    def _reducescatter(
        self, source: torch.Tensor, target: torch.Tensor, transfer: _native.Transfer, rows: list[int], launch: Launch
    ) -> Any:
        if len(set(rows)) == 1:
            options = dist.ReduceScatterOptions()
            options.reduceOp = getattr(dist.ReduceOp, _REDUCTIONS[transfer.reduce])
            return self.backend._reduce_scatter_base(target, source, options)
        row = transfer.count // sum(rows)
        part = source.split([count * row for count in rows])[self.rank]
        launch.afterwards(lambda: target.copy_(part))
        return self._allreduce(source, transfer)

    def _allgather(self, source: torch.Tensor, target: torch.Tensor, lengths: list[int]) -> list[Any]:
        if len(set(lengths)) == 1:
            return [self.backend._allgather_base(target, source)]
        parts = target.split(lengths)
        parts[self.rank].copy_(source)
        return [self._broadcast(part, root) for root, part in enumerate(parts) if part.numel()]

    def _stand_in(self, transfer: _native.Transfer) -> Launch:
        """What a rank that has joined takes part with: nothing that counts, and memory for what it must receive."""
        with platform.stream(self.stream):
            if transfer.kind in (_native.ALLREDUCE, _native.REDUCESCATTER):
                identity = _identity(transfer, self.device)
                rows = _rows(transfer.sent, self.size)
                target = identity.new_empty(transfer.count // sum(rows) * rows[self.rank]) if rows else identity
                return Launch(identity, target)
            length = transfer.count if transfer.kind == _native.BROADCAST else transfer.row_bytes * sum(_rows(transfer.received, self.size))
            nothing, target = (torch.empty(count, dtype=torch.uint8, device=self.device) for count in (0, length))
            return Launch(nothing, target)

    # --- while the GPU is at work

    def busy_since(self) -> float | None:
        """Since when the GPU, or a call of NCCL, has been at work on the oldest of what it has to do; None if on nothing.

        Raises RuntimeError where the GPU or NCCL has failed.
        """
        busy, first = self._calling, self._first_under_way()
        while first is not None and platform.is_done(first[1]):
            first = self._first_under_way(behind=first)
        get_error = getattr(self.backend, "get_error", None)  # of ProcessGroupNCCL, from PyTorch 2.7
        error = getattr(get_error(), "name", "SUCCESS") if get_error is not None else "SUCCESS"
        if error != "SUCCESS":
            raise RuntimeError(f"NCCL reports {error}")
        return busy if first is None else first[0]

    def _first_under_way(self, behind: tuple[float, Any] | None = None) -> tuple[float, Any] | None:
        """``behind``: what was the first, and is done."""
        with self._turn:
            if behind is not None and self._under_way and self._under_way[0] is behind:
                self._under_way.popleft()
            return self._under_way[0] if self._under_way else None

    def end(self, reason: str) -> None:
        """Ends the communicator with what it has under way, which may wait for a rank that is gone.

        Not by NCCL's orderly way, which waits for the other ranks to do the same.
        """
        with self._turn:
            if self.broken:
                return
            self.broken = reason
        aborting = threading.Thread(target=self._abort, name="collective_core nccl", daemon=True)
        aborting.start()
        aborting.join(ABORT_TIME)
        if aborting.is_alive():
            print(f"collective_core: NCCL has not ended what is under way within {ABORT_TIME:g} s", file=sys.stderr, flush=True)

    def _abort(self) -> None:
        calls = ("abort", "_abort", "shutdown", "_shutdown")
        try:
            next((getattr(self.backend, name) for name in calls if hasattr(self.backend, name)), lambda: None)()
        except RuntimeError as error:
            print(f"collective_core: what is under way on a GPU could not be ended: {error}", file=sys.stderr, flush=True)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _factors(transfer: _native.Transfer, prescale: float, postscale: float) -> tuple[float, float]:
    """What each input is multiplied by before the calls, and the result after them.

    NCCL adds half types in their own precision, where a sum can overflow though the average does not: inputs are divided, not the sum.
    """
    if transfer.reduce != _native.AVERAGE:
        return prescale, postscale
    if _DTYPES[transfer.dtype] in HALF:
        return prescale / transfer.contributors, postscale
    return prescale, postscale / transfer.contributors


def _identity(transfer: _native.Transfer, device: torch.device) -> torch.Tensor:
    dtype = _DTYPES[transfer.dtype]
    if dtype.is_floating_point:
        most, least = float("inf"), float("-inf")
    else:
        most, least = torch.iinfo(dtype).max, torch.iinfo(dtype).min
    neutral = {_native.PRODUCT: 1, _native.MIN: most, _native.MAX: least}.get(transfer.reduce, 0)
    return torch.full((transfer.count,), neutral, dtype=dtype, device=device)


# --- the process sets' groups

groups: dict[int, Group] = {}


def connect(members: Members, device: torch.device, exchange: Callable[[dict[str, Any]], list[dict[str, Any]]], limit: float) -> str:
    """Makes the group of a process set. Collective. Returns why there is none, the same on all ranks; empty if there is.

    ``exchange``: gives all ranks' JSON documents. ``limit``: seconds, when all have had their turn (COLLECTIVE_TIMEOUT).
    """
    timeout = membership.current().config.timeout
    store = Relay()
    group = groups[members.id] = Group(members, device)  # from now on what this rank starts is ordered
    outcome: list[str] = []
    had_turn: list[bool] = []

    def make() -> None:
        try:
            end = time.monotonic() + timeout
            while not order.is_next(members.id) and not group.broken:
                if time.monotonic() > end:
                    raise CollectiveError(f"what goes before it has taken more than {timeout:g} s (COLLECTIVE_TIMEOUT)", "timeout")
                time.sleep(RELAY_INTERVAL)
            had_turn.append(True)
            group.refuse_if_broken()
            group.make(store)
            outcome.append("")
        except Exception as failure:  # noqa: BLE001 - told to all ranks
            outcome.append(f"{type(failure).__name__}: {failure}")

    making = threading.Thread(target=make, name="collective_core nccl", daemon=True)
    begin: float | None = None  # when all ranks have had their turn: until then others connect, or launch, with limits of their own
    problem = "a rank has failed meanwhile"
    try:
        order.enter(members.id, max(each["order"] for each in exchange({"order": order.enter(members.id)})))
        making.start()
        while True:
            making.join(RELAY_INTERVAL)
            is_made = not making.is_alive()
            late = not is_made and begin is not None and time.monotonic() - begin > limit
            error = outcome[0] if is_made else f"not connected within {limit:g} s (COLLECTIVE_START_TIMEOUT)" if late else ""
            told = {key: value.hex() for key, value in store.take_untold().items()}
            everyone = exchange({"told": told, "is_made": is_made, "error": error, "has_turn": bool(had_turn)})
            if begin is None and all(each["has_turn"] for each in everyone):
                begin = time.monotonic()
            for each in everyone:
                store.learn({key: bytes.fromhex(value) for key, value in each["told"].items()})
            errors = [f"rank {rank}: {each['error']}" for rank, each in zip(members.ranks, everyone) if each["error"]]
            if errors or len(everyone) < members.size:
                problem = f"NCCL could not be started ({errors[0] if errors else 'a rank has joined meanwhile'})"
                break
            if all(each["is_made"] for each in everyone):
                problem = ""
                break
    finally:
        order.leave(members.id)
        if problem:
            store.close(problem)
            group.end(problem)
            groups.pop(members.id, None)
    if not problem:
        _use_transport()
    return problem


@functools.lru_cache(maxsize=None)
def _use_transport() -> None:
    """Once: the engine may be in a call while another process set gets its group."""
    _native.use_transport(_start, _test, device=_native.GPU_MEMORY)


def _withdraw(process_set: int) -> None:
    """Its operation has failed before it was launched."""
    group = groups.get(process_set)
    if group is not None:
        group.waiting = None
    order.leave(process_set)


def _start(transfer: Any, error: int, capacity: int) -> int:
    """The engine's call, when all have agreed."""
    contents = transfer.contents
    try:
        if contents.kind != _native.BARRIER:
            groups[contents.process_set].start(contents)
        elif contents.order:
            _withdraw(contents.process_set)
        else:
            contents.order = order.enter(contents.process_set)
            if contents.process_set not in groups:  # looked at behind `enter`: _leave may be at work
                raise CollectiveError(f"this process has left process set {contents.process_set}", "closed")
    except BaseException as failure:  # noqa: BLE001 - nothing may cross the C interface
        order.leave(contents.process_set)
        return _native.say(failure, error, capacity)
    return 0


def _test(process_set: int, error: int, capacity: int) -> int:
    """The engine's question whether it is under way."""
    try:
        group = groups[process_set]
        problem = group.test()
        if problem is None:
            return 0 if group.waiting is None else WAITS_FOR_TURN
        return _native.say(problem, error, capacity) if problem else 1
    except BaseException as failure:  # noqa: BLE001 - nothing may cross the C interface
        return _native.say(failure, error, capacity)


def finish() -> None:
    """Waits until the GPU has done all it has to, or a failure has ended it, which is noted.

    What waits for its turn is waited for, too, but not for ever: the engine, which asks for it, may have ended.
    """
    end = time.monotonic() + ABORT_TIME
    try:
        for group in list(groups.values()):
            while membership.failure() is None and (
                group.busy_since() is not None or (group.waiting is not None and time.monotonic() < end)
            ):
                time.sleep(0.001)
            platform.synchronize(group.device)
        platform.synchronize()
    except RuntimeError as error:
        _reason(error)


def _reason(error: RuntimeError, *process_sets: int) -> BaseException:
    """What has ended operations on this GPU, which is noted: a failure of the engine's, which may come a moment later, or ``error``."""
    failure = error if isinstance(error, CollectiveError) else None
    end = time.monotonic() + BLAME_AFTER
    while failure is None and membership.failure() is None and time.monotonic() < end:
        try:
            for number in process_sets or list(groups):
                _native.check_peers(number)
            time.sleep(INTERVAL)
        except CollectiveError as found:
            failure = found
    failure = failure or CollectiveError(f"a GPU failed: {error}", "internal")
    if failure.kind != "closed" and membership.failure() is None:  # closed: the program has left the job
        print(f"collective_core: operations on GPUs are ended: {failure}", file=sys.stderr, flush=True)
        membership.note_failure(failure)
    return membership.failure() or failure


def _abort() -> None:
    """After a failure: nothing on this GPU may wait for other ranks any more."""
    for group in list(groups.values()):
        group.end("its communicator was aborted after a failure")


def _leave(process_set: int) -> None:
    """This process leaves the process set."""
    group = groups.get(process_set)
    if group is not None:
        if membership.is_healthy():
            finish()
        del groups[process_set]
        group.end("this process has left the process set")
    if process_set == 0:  # it leaves the job
        order.clear()
    order.leave(process_set)


membership.after_failure.append(_abort)
process_sets.on_leaving.append(_leave)

_turn = threading.Lock()  # of what follows
_watcher: threading.Thread | None = None  # while a GPU is at work


def _watch() -> None:
    global _watcher
    with _turn:
        if _watcher is None:
            _watcher = threading.Thread(target=_see_to, name="collective_core gpu", daemon=True)
            _watcher.start()


def _see_to() -> None:
    global _watcher
    try:
        while True:
            time.sleep(INTERVAL)
            with _turn:
                since = {group.number: group.busy_since() for group in list(groups.values()) if not group.broken}
                if not any(when is not None for when in since.values()):
                    _watcher = None
                    return
            for number, when in since.items():
                if when is None:
                    continue
                _native.check_peers(number)
                limit = min(membership.current().config.timeout, HUNG_AFTER)
                if time.monotonic() - when > limit:
                    raise CollectiveError(f"a GPU has not finished a collective of process set {number} within {limit:g} s", "timeout")
    except RuntimeError as failure:  # ours, or CUDA's at a look at an event
        _reason(failure)
    finally:
        with _turn:
            if _watcher is threading.current_thread():
                _watcher = None
