"""CUDA tensors through NCCL: allreduce and broadcast where they lie, on a stream of our own, without waiting for the GPU.

The ranks agree on an operation on the host, as on every other; then each puts it on its stream, which first waits for what the caller's
stream had to do (an event). The operation counts as done when it is under way; taking its result makes the caller's stream wait for
another event. So the host never waits for the GPU, and work on the GPU keeps the order of the program.

NCCL is used when COLLECTIVE_NCCL asks for it, in a process set whose members all have a GPU and the same NCCL, which they tell each other
when the set is made (rendezvous.py). Otherwise, and for what NCCL does not know, CUDA tensors go through host memory. The first operation
of a set joins NCCL's communicator, in a thread of its own, so that a rank that dies meanwhile is noticed. While a GPU is at work, another
thread sees to it (gpu_watch.py). When the engine has failed, communicators are aborted.

Two ranks on one GPU cannot use NCCL. The ranks compare their GPUs before the first operation; then all go through host memory.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import threading
import warnings
import weakref
from typing import Any, Callable, Sequence

import numpy as np
import torch

from collective_core import _native, arrays, context, nccl, rendezvous
from collective_core.arrays import Average, Max, Min, Product, Sum
from collective_core.errors import CollectiveError
from collective_core.process_sets import Members, ProcessSet, members, process_set_by_id
from collective_core.torch import gpu_watch
from collective_core.torch.ops.handles import Work

#: Seconds for which an abort waits for what is being put on the stream. Beyond that it is NCCL itself that waits there for a rank.
ABORT_PATIENCE = 5.0
#: Bytes of a GPU's name that are compared.
GPU_NAME = 64
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
        self.tag = next(_tags) % (1 << 31) or next(_tags) % (1 << 31)


class _Set:
    """A process set whose members use NCCL."""

    def __init__(self, number: int, unique_id: bytes, size: int, rank: int) -> None:
        self.number, self.unique_id, self.size, self.rank = number, unique_id, size, rank
        self.communicator = 0
        self.device: torch.device | None = None
        self.stream: Any = None
        # What the callers asked for, by its tag. They hold it for as long as they need it, which ends when it failed.
        self.asked: weakref.WeakValueDictionary[int, Launch] = weakref.WeakValueDictionary()
        self.compared = False
        self.joining: threading.Thread | None = None
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


_tags = itertools.count(1)
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
    gpu_watch.forget(process_set)
    communicator = old.retire("its process set was made anew") if old is not None else 0
    if communicator and library is not None:
        library.destroy(communicator)
    if library is None or len(offers) < 2 or any(not other or other["version"] != offers[0]["version"] for other in offers):
        return
    _sets[process_set] = _Set(process_set, bytes.fromhex(offers[0]["id"]), len(offers), rank)
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
    """Whether NCCL moves this tensor in this set. Collective at the set's first tensor on a GPU."""
    if tensor.is_cuda and who.id in _sets and not _sets[who.id].compared:
        _compare_gpus(tensor.device, who)
    return tensor.is_cuda and who.id in _sets and tensor.layout is torch.strided


def _compare_gpus(device: torch.device, who: Members) -> None:
    mine = str(getattr(torch.cuda.get_device_properties(device), "uuid", f"unknown, of rank {who.rank}"))
    row = np.frombuffer(mine.encode()[:GPU_NAME].ljust(GPU_NAME), dtype=np.uint8).reshape(1, GPU_NAME)
    try:
        rows = arrays.allgather(row, f"the first CUDA tensor of process set {who.id}", process_set=process_set_by_id(who.id))
    except CollectiveError as error:
        if error.kind != "mismatch":
            raise
        text = f"at the first CUDA tensor the ranks compare their GPUs, so all ranks begin with one; some did something else: {error}"
        raise CollectiveError(text, error.kind, error.ranks) from error
    _sets[who.id].compared = True
    shared = ranks_that_share([bytes(row) for row in rows])
    if shared:
        del _sets[who.id]
        if who.rank == 0:
            text = "; ".join(" and ".join(str(who.ranks[number]) for number in numbers) for numbers in shared)
            warnings.warn(
                f"ranks {text} use the same GPU, which NCCL does not allow: CUDA tensors go through host memory. "
                "Give every rank its own with torch.cuda.set_device(local_rank())",
                stacklevel=2,
            )


def ranks_that_share(gpus: Sequence[bytes]) -> list[list[int]]:
    """The ranks of every GPU that more than one has; ``gpus`` by rank. Pure."""
    ranks_of: dict[bytes, list[int]] = {}
    for rank, gpu in enumerate(gpus):
        ranks_of.setdefault(gpu, []).append(rank)
    return [ranks for ranks in ranks_of.values() if len(ranks) > 1]


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
    asked.tag = launch.tag
    _sets[who.id].asked[launch.tag] = launch

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
    facts = {name: getattr(asked, name) for name in ("kind", "dtype", "reduce", "root", "contributors", "tag", "count")}
    own.problem = own.broken
    if own.broken:
        return 0
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
        launch = own.asked.pop(facts["tag"]) if facts["tag"] else None  # a rank that has joined has asked for nothing
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
                    _put_on_stream(library, own, facts, launch)
                    end = torch.cuda.Event()
                    end.record(own.stream)
        gpu_watch.see_to(own.number, end)
    except Exception as failure:  # noqa: BLE001 - the engine tells all ranks
        own.problem = f"{failure}; without COLLECTIVE_NCCL CUDA tensors go through host memory"


def _abort() -> None:
    """After a failure: nothing on this GPU may wait for other ranks any more."""
    library = nccl.library()
    for own in list(_sets.values()):
        communicator = own.retire("its communicator was aborted after a failure")
        if communicator and library is not None:
            try:
                library.abort(communicator)
            except CollectiveError as error:
                print(f"collective_core: what is under way on a GPU could not be ended: {error}", file=sys.stderr, flush=True)


context.after_failure.append(_abort)


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
