"""CUDA tensors through NCCL: allreduce and broadcast where they lie, on a stream of our own, without waiting for the GPU.

The ranks agree on an operation on the host, as on every other; then each puts it on its stream, which first waits for what the caller's
stream had to do (an event). The operation counts as done when it is under way; taking its result makes the caller's stream wait for
another event. So the host never waits for the GPU, and work on the GPU keeps the order of the program.

NCCL is used when COLLECTIVE_NCCL asks for it, in a process set whose members all have a GPU and the same NCCL, which they tell each other
when the set is made (rendezvous.py). Otherwise, and for what NCCL does not know, CUDA tensors go through host memory. The first operation
of a set joins NCCL's communicator, in a thread of its own, so that a rank that dies meanwhile is noticed.
"""

from __future__ import annotations

import ctypes
import threading
import warnings
import weakref
from collections import defaultdict, deque
from typing import Any, Callable

import torch

from collective_core import _native, arrays, nccl, rendezvous
from collective_core.arrays import Average, Max, Min, Product, Sum
from collective_core.errors import CollectiveError
from collective_core.process_sets import Members, ProcessSet, members
from collective_core.torch.ops.handles import Work

_REDUCTIONS = {
    _native.SUM: nccl.SUM,
    _native.AVERAGE: nccl.SUM,  # the division comes after it: ranks that have joined do not count
    _native.PRODUCT: nccl.PRODUCT,
    _native.MIN: nccl.MIN,
    _native.MAX: nccl.MAX,
}
_NAMES = {number: name for name, number in _native.DTYPES.items()}


class Launch:
    """An operation that was asked for: its tensors on the GPU, and the events around it."""

    def __init__(self, source: torch.Tensor, target: torch.Tensor, prescale: float, postscale: float) -> None:
        self.source, self.target, self.prescale, self.postscale = source, target, prescale, postscale
        self.ready, self.done = torch.cuda.Event(), torch.cuda.Event()
        self.ready.record(torch.cuda.current_stream(source.device))


class _Set:
    """A process set whose members use NCCL."""

    def __init__(self, unique_id: bytes, size: int, rank: int) -> None:
        self.unique_id, self.size, self.rank = unique_id, size, rank
        self.communicator = 0
        self.device: torch.device | None = None
        self.stream: Any = None
        # What the callers asked for, by its addresses. They hold it for as long as they need it, which ends when it failed.
        self.asked: dict[tuple[int, int], deque[weakref.ref[Launch]]] = defaultdict(deque)
        self.joining: threading.Thread | None = None
        self.problem = ""


_sets: dict[int, _Set] = {}


def offer(is_first: bool) -> dict[str, Any] | None:
    """What this rank tells the others of a new process set."""
    library = nccl.library() if nccl.is_wanted() and torch.cuda.is_available() else None
    if library is None:
        return None
    try:
        return {"version": library.version, "id": library.unique_id().hex() if is_first else ""}
    except CollectiveError as error:
        warnings.warn(f"CUDA tensors go through host memory: {error}", stacklevel=2)
        return None


def learn(process_set: int, rank: int, offers: list[Any]) -> None:
    """What all members of a new process set have told."""
    old = _sets.pop(process_set, None)
    library = nccl.library()
    if old is not None and old.communicator and library is not None:
        library.destroy(old.communicator)
    if library is None or len(offers) < 2 or any(not other or other["version"] != offers[0]["version"] for other in offers):
        return
    _sets[process_set] = _Set(bytes.fromhex(offers[0]["id"]), len(offers), rank)
    _native.use_carrier(_start, _test, device=_native.GPU_MEMORY)


rendezvous.companions["nccl"] = (offer, learn)


def is_used(process_set: ProcessSet | None = None) -> bool:
    """Whether CUDA tensors of the set go through NCCL."""
    return members(process_set).id in _sets


def carries(tensor: torch.Tensor, op: str, prescale: float, postscale: float, who: Members) -> bool:
    """Whether an allreduce goes through NCCL: the same on all ranks that ask for the same. Fractions of integers do not."""
    known = str(tensor.dtype).replace("torch.", "") in nccl.TYPES
    plain = op in (Sum, Min, Max, Product) and prescale == 1.0 and postscale == 1.0
    return is_within_reach(tensor, who) and known and (plain or (tensor.is_floating_point() and op in (Sum, Average)))


def is_within_reach(tensor: torch.Tensor, who: Members) -> bool:
    """Whether NCCL moves this tensor in this set."""
    return tensor.is_cuda and who.id in _sets and tensor.layout is torch.strided


def start(
    tensor: torch.Tensor,
    output: torch.Tensor,
    operation: Callable[[int, int], _native.Operation],
    who: Members,
    blocking: bool,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> Work:
    """Starts a collective from ``tensor`` to ``output``, which may be the same. ``operation``: of the engine, from their addresses."""
    source = tensor.detach().contiguous()
    in_place = output.is_contiguous()
    target = output.detach() if in_place else torch.empty_like(source)
    launch = Launch(source, target, prescale, postscale)
    asked = operation(source.data_ptr(), target.data_ptr())
    if source.numel():
        _sets[who.id].asked[source.data_ptr(), target.data_ptr()].append(weakref.ref(launch))

    def finish() -> torch.Tensor:
        if source.numel():
            torch.cuda.current_stream(source.device).wait_event(launch.done)
        if not in_place:
            with torch.no_grad():
                output.copy_(target)
        return output

    if blocking:
        arrays.run(asked)
        return Work(0, finish)
    return Work(_native.submit(asked), finish, (source, target, asked, launch))


def _start(transfer: Any, _error: int, _capacity: int) -> int:
    """The engine's call: all ranks have agreed, so all put the same on their streams, in the same order."""
    asked = transfer.contents
    own = _sets[asked.process_set]
    # The structure is gone when this call returns.
    facts = {name: getattr(asked, name) for name in ("kind", "dtype", "reduce", "root", "contributors", "input", "output", "count")}
    own.problem = ""
    if own.communicator:
        _launch(own, facts)
    else:
        own.joining = threading.Thread(target=_launch, args=(own, facts), daemon=True)
        own.joining.start()
    return 0


def _test(process_set: int, error: int, capacity: int) -> int:
    own = _sets[process_set]
    if own.joining is not None:
        own.joining.join(0.001)
        if own.joining.is_alive():
            return 0
        own.joining = None
    if own.problem:
        text = own.problem.encode()[: capacity - 1] + b"\0"
        ctypes.memmove(error, text, len(text))
        return -1
    return 1


def _launch(own: _Set, facts: dict[str, Any]) -> None:
    try:
        library = nccl.library()
        if library is None:
            raise RuntimeError("NCCL was switched off while it was in use")
        launch = _asked_for(own, facts["input"], facts["output"])
        if own.device is None:
            own.device = launch.source.device if launch else torch.device("cuda", torch.cuda.current_device())
        if launch and launch.source.device != own.device:
            raise RuntimeError(f"a rank uses one GPU: this one has used {own.device}, and now {launch.source.device}")
        with torch.cuda.device(own.device):
            if not own.communicator:
                own.stream = torch.cuda.Stream(own.device)
                own.communicator = library.communicator(own.size, own.unique_id, own.rank)
            with torch.cuda.stream(own.stream):
                _put_on_stream(library, own, facts, launch)
    except Exception as failure:  # noqa: BLE001 - the engine tells all ranks
        own.problem = f"{failure}; without COLLECTIVE_NCCL CUDA tensors go through host memory"


def _asked_for(own: _Set, source: int | None, target: int | None) -> Launch | None:
    """What this rank's caller asked for; None on a rank that has joined."""
    waiting = own.asked.get((source or 0, target or 0), deque())
    while waiting:
        launch = waiting.popleft()()
        if launch is not None:
            return launch
    own.asked.pop((source or 0, target or 0), None)
    return None


def _put_on_stream(library: nccl.Library, own: _Set, facts: dict[str, Any], launch: Launch | None) -> None:
    stream = own.stream.cuda_stream
    if launch is None:
        source = target = _identity(facts, own.device)
    else:
        own.stream.wait_event(launch.ready)
        source, target = launch.source, launch.target
        # PyTorch gives memory back when the caller lets go of it; the stream may still be at work on it then.
        source.record_stream(own.stream)
        target.record_stream(own.stream)
        if launch.prescale != 1.0:
            source = source * launch.prescale
    if facts["kind"] == _native.BROADCAST:
        library.broadcast(
            source.data_ptr(), target.data_ptr(), facts["count"], nccl.TYPES["uint8"], facts["root"], own.communicator, stream
        )
    else:
        number, reduction = nccl.TYPES[_NAMES[facts["dtype"]]], _REDUCTIONS[facts["reduce"]]
        library.all_reduce(source.data_ptr(), target.data_ptr(), facts["count"], number, reduction, own.communicator, stream)
    if launch is not None:
        divisor = facts["contributors"] if facts["kind"] == _native.ALLREDUCE and facts["reduce"] == _native.AVERAGE else 1
        if launch.postscale / divisor != 1.0:
            target.mul_(launch.postscale / divisor)
        launch.done.record(own.stream)


def _identity(facts: dict[str, Any], device: Any) -> torch.Tensor:
    """What a rank that has joined takes part with."""
    if facts["kind"] == _native.BROADCAST:
        return torch.empty(facts["count"], dtype=torch.uint8, device=device)
    dtype = getattr(torch, _NAMES[facts["dtype"]])
    if dtype.is_floating_point:
        most, least = float("inf"), float("-inf")
    else:
        most, least = torch.iinfo(dtype).max, torch.iinfo(dtype).min
    neutral = {nccl.SUM: 0, nccl.PRODUCT: 1, nccl.MIN: most, nccl.MAX: least}
    return torch.full((facts["count"],), neutral[_REDUCTIONS[facts["reduce"]]], dtype=dtype, device=device)
