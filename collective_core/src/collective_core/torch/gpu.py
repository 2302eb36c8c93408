"""Ways of CUDA tensors: through NCCL where they lie (nccl.py), or through pinned host memory, by the engine.

NCCL is used in a process set where every rank has a GPU of its own and the same NCCL, unless COLLECTIVE_NCCL says otherwise. The ranks
agree on that at their first CUDA tensor. The engine agrees on every operation either way. For what NCCL does not know, and for Adasum, CUDA
tensors go through host memory also where it is used.

On the way through host memory a tensor is copied on a stream beside the program's, and the engine is asked when the copy is there.
"""

from __future__ import annotations

import functools
import json
import sys
import threading
from collections import deque
from typing import Any, Callable, Sequence

import numpy as np
import torch

from collective_core import _native, arrays
from collective_core.errors import CollectiveError
from collective_core.runtime import membership, operations, process_sets
from collective_core.runtime.process_sets import Members, ProcessSet, members_of, process_set_by_id
from collective_core.torch import handles, nccl, tensors, ways
from collective_core.torch.handles import Work
from collective_core.torch.nccl import Launch
from collective_core.torch.tensors import is_plain, new_like
from collective_core.torch.ways import Combine

#: By process set: why its CUDA tensors go through host memory, empty where they do not. Once the ranks have agreed.
_agreed: dict[int, str] = {}
_agreeing: dict[int, threading.Lock] = {}


def _forget(process_set: int) -> None:
    _agreed.pop(process_set, None)


process_sets.on_leaving.append(_forget)


def holds(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a GPU's."""
    return nccl.platform.holds(tensor)


def is_used(process_set: ProcessSet | None = None) -> bool:
    """Whether CUDA tensors of the set go through NCCL; before the first of them, whether this rank has what it takes."""
    problem = _agreed.get(members_of(process_set).id)
    return not problem if problem is not None else not _own_unsupported_reason()


def _own_unsupported_reason() -> str:
    return "COLLECTIVE_NCCL=off" if membership.current().config.nccl == "off" else nccl.platform.unsupported_reason()


def _runs_with_nccl(asked: _native.Operation, tensor: torch.Tensor, combine: Combine | None = None) -> bool:
    """Whether the operation goes through NCCL: the same on all ranks that ask for the same. Fractions of integers do not."""
    moves = moves_with_nccl(tensor, members_of(process_set_by_id(asked.process_set)))
    if not moves or asked.unsupported_reason or combine is not None:
        return False
    if asked.kind not in (_native.ALLREDUCE, _native.REDUCESCATTER):
        return True
    plain = asked.reduce != _native.AVERAGE and asked.prescale == 1.0 and asked.postscale == 1.0
    adds = asked.reduce in (_native.SUM, _native.AVERAGE)
    return tensor.dtype in nccl.REDUCED and (plain or (tensor.is_floating_point() and adds))


def moves_with_nccl(tensor: torch.Tensor, members: Members) -> bool:
    """Whether NCCL moves this tensor of a GPU in this set. Collective at the set's first one."""
    if tensor.layout is not torch.strided:
        return False
    with _agreeing.setdefault(members.id, threading.Lock()):
        if members.id not in _agreed:
            problem = _agree(tensor.device, members)
            if problem is None:
                return False
            _agreed[members.id] = problem
    group = nccl.groups.get(members.id)
    if group is not None and group.device != tensor.device:
        text = f"this rank's GPU in process set {members.id} is {group.device}, so a tensor on {tensor.device} goes through host memory"
        _say_once(f"{text}, which is slower than NCCL and an error where other ranks' goes through NCCL")
    return group is not None and group.device == tensor.device


@functools.lru_cache(maxsize=None)
def _say_once(text: str) -> None:
    """Not as a warning, of which a program may make an error: this rank's alone, and the others would wait for it."""
    print(f"collective_core: {text}", file=sys.stderr, flush=True)


def _agree(device: torch.device, members: Members) -> str | None:
    """Why the ranks do not use NCCL, empty if they do; None while some have joined, which cannot connect."""
    settings = membership.current().config
    mine: dict[str, Any] = {"setting": settings.nccl, "unsupported_reason": _own_unsupported_reason(), "gpu": "", "version": []}
    mine["library"] = "RCCL" if torch.version.hip else "NCCL"  # they cannot connect, also where both call themselves 2.27.7
    if not mine["unsupported_reason"]:
        mine.update(gpu=nccl.platform.identity(device), version=list(nccl.platform.version()))

    def exchange(document: dict[str, Any]) -> list[dict[str, Any]]:
        return _exchange(document, members)

    everyone = exchange(mine)
    if len(everyone) < members.size:
        return None
    problem = unsupported_reason_of(everyone, members.ranks) or nccl.connect(members, device, exchange, settings.start_timeout)
    if problem and settings.nccl == "on":
        raise CollectiveError(f"COLLECTIVE_NCCL=on, and NCCL cannot be used: {problem}", "invalid")
    if problem and settings.nccl != "off" and members.rank == 0:
        _say_once(f"CUDA tensors go through host memory, which is slower than NCCL: {problem}")
    return problem


def unsupported_reason_of(everyone: Sequence[dict[str, Any]], ranks: Sequence[int]) -> str:
    """Why ranks that have told this of themselves do not use NCCL; empty if they do. Pure."""
    for rank, each in zip(ranks, everyone):
        if each["unsupported_reason"]:
            return f"rank {rank}: {each['unsupported_reason']}"
    library = everyone[0]["library"]
    if other := [rank for rank, each in zip(ranks, everyone) if each["library"] != library]:
        return f"rank {ranks[0]} has {library}, and rank {other[0]} a GPU of another vendor"
    different = [rank for rank, each in zip(ranks, everyone) if each["version"] != everyone[0]["version"]]
    if different:
        return f"ranks {ranks[0]} and {different[0]} have different versions of {library}"
    if everyone[0]["setting"] == "on":  # NCCL itself then says whether ranks can share a GPU
        return ""
    ranks_of: dict[str, list[int]] = {}
    for rank, each in zip(ranks, everyone):
        ranks_of.setdefault(each["gpu"] or f"unknown, of rank {rank}", []).append(rank)
    shared = [" and ".join(map(str, sharing)) for sharing in ranks_of.values() if len(sharing) > 1]
    if shared:
        return f"ranks {'; '.join(shared)} use the same GPU. Give every rank its own with torch.cuda.set_device(local_rank())"
    return ""


def _exchange(document: dict[str, Any], members: Members) -> list[dict[str, Any]]:
    """All ranks' JSON documents, without those of ranks that have joined."""
    line = np.frombuffer(json.dumps(document).encode() + b"\n", dtype=np.uint8)
    try:
        lines = arrays.allgather_without_joined(line, f"the first CUDA tensor of process set {members.id}", process_set_by_id(members.id))
    except CollectiveError as error:
        if error.kind != "mismatch":
            raise
        text = f"at the first CUDA tensor the ranks compare their GPUs, so all ranks begin with one; some did something else: {error}"
        raise CollectiveError(text, error.kind, error.ranks) from error
    return [json.loads(text) for text in lines.tobytes().decode().splitlines()]


# --- through NCCL


class _LaunchWork(Work):
    """Done when the GPU is; its result waits only on the caller's stream."""

    __slots__ = ("_launch",)

    def __init__(
        self, handle: int, finish: Callable[[], Any], asked: _native.Operation, launch: Launch, keeps_handle: bool = False
    ) -> None:
        super().__init__(handle, finish, (asked, launch), keeps_handle)
        self._launch = launch

    def is_done(self) -> bool:
        end, group = self._launch.end, self._launch.group
        return super().is_done() and (end is None or (group is not None and bool(group.broken)) or nccl.platform.is_done(end))


def start(
    asked: _native.Operation,
    tensor: torch.Tensor,
    output: torch.Tensor,
    blocking: bool,
    is_root: bool | None,
    combine: Combine | None,
) -> Work | Copying:
    """As ``ways.start``, of a GPU's tensor."""
    if not _runs_with_nccl(asked, tensor, combine):
        values, copied = host_copy(asked, tensor)
        result = values if values.shape == output.shape else torch.empty(output.shape, dtype=values.dtype)
        finish = ways.finish_of(tensor, result, output, is_root, non_blocking=copied is not None)
        waits = blocking or combine is not None
        return when_copied(copied, lambda: ways.begin(asked, values, result, blocking, finish, combine), waits)
    in_place = output.is_contiguous() and is_plain(output)
    source = target = output.detach() if in_place else new_like(output.detach())
    if asked.kind == _native.REDUCESCATTER:
        source = _to_scatter(asked, tensor)
    elif is_root is not False and (output is not tensor or not in_place):
        target.copy_(tensor.detach())
    asked.input, asked.output = source.data_ptr() or None, target.data_ptr() or source.data_ptr() or None
    launch = Launch(source, target, asked.prescale, asked.postscale)
    _note(launch, asked)
    finish = ways.finish_of(tensor, target, output, is_root=None)

    def hand_over() -> torch.Tensor:
        """When the caller's stream waits for the result."""
        launch.hand_over()
        return finish()

    handle = operations.start(asked, blocking)
    return _LaunchWork(handle, hand_over, asked, launch) if handle else Work(0, hand_over)


def _to_scatter(asked: _native.Operation, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy where its values are changed on the way."""
    source = _contiguous(tensor)
    is_scaled = asked.prescale != 1.0 or (asked.reduce == _native.AVERAGE and tensor.dtype in nccl.HALF)
    uneven = tensor.shape[0] % members_of(process_set_by_id(asked.process_set)).size
    return source.clone() if (is_scaled or uneven) and source.data_ptr() == tensor.data_ptr() else source


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def start_rows(asked: _native.Operation, tensor: torch.Tensor, blocking: bool, size: int) -> Work | Copying:
    """As ``ways.start_rows``, of a GPU's tensor."""
    if not _runs_with_nccl(asked, tensor):
        values, copied = host_copy(asked, tensor)
        return when_copied(copied, lambda: ways.begin_rows(asked, values, tensor, blocking, size), blocking)
    source = _contiguous(tensor)
    asked.input = source.data_ptr() or None
    launch = Launch(source, None)
    _note(launch, asked)
    handle = _native.submit(asked, _native.BLOCKING if blocking else _native.QUEUED)

    def hand_over() -> tuple[torch.Tensor, list[int]]:
        _, rows = operations.take_received(handle, size)
        received = launch.hand_over()
        return source.new_empty((sum(rows), *source.shape[1:])) if received is None else received, rows

    return _LaunchWork(handle, hand_over, asked, launch, keeps_handle=True)


def _note(launch: Launch, asked: _native.Operation) -> None:
    """Where the transport finds it when all have agreed."""
    group = nccl.groups[asked.process_set]
    group.refuse_if_broken()
    asked.device = _native.GPU_MEMORY
    # Not whether several have NCCL: that differs between ranks, and a set may get it while this operation waits.
    asked.tag, asked.ordered = launch.tag, process_sets.are_several()
    group.asked[launch.tag] = launch


# --- through host memory

_copying: deque[Copying] = deque()  # in the order in which they were asked for
_copying_turn = threading.RLock()
_streams: dict[torch.device, Any] = {}


def host_copy(asked: _native.Operation, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """A copy of a GPU's tensor in host memory, and the event behind which it has the values; nothing of one that cannot be sent."""
    if asked.unsupported_reason:
        return torch.empty(0), None
    plain = tensor.detach().resolve_conj()
    if tensor.device not in _streams:
        _streams[tensor.device] = nccl.platform.new_stream(tensor.device)
    memory = nccl.platform.host_memory(plain)
    with nccl.platform.stream(_streams[tensor.device], nccl.platform.event(tensor.device)):
        memory.copy_(plain, non_blocking=True)
        nccl.platform.keep(plain)
        return memory, nccl.platform.event(tensor.device)


class Copying:
    """A :class:`Work` that begins when a copy is there."""

    def __init__(self, copied: Any, begin: Callable[[], Work]) -> None:
        self.copied, self._begin = copied, begin
        self._work: Work | None = None
        self._error: Exception | None = None

    def begin(self) -> None:
        try:
            self.copied.synchronize()
            self._work = self._begin()
        except Exception as error:  # noqa: BLE001 - raised where the result is asked for
            self._error = error

    def is_done(self) -> bool:
        begin_copied()
        return self._error is not None or (self._work is not None and self._work.is_done())

    def result(self) -> Any:
        begin_copied(self)
        if self._work is None:
            raise self._error or CollectiveError("the operation was forgotten", "closed")
        return self._work.result()


def when_copied(copied: Any, begin: Callable[[], Work], blocking: bool) -> Work | Copying:
    """What ``begin`` returns, or something like it that calls it behind the event ``copied``, if there is one."""
    if copied is not None and blocking:
        begin_copied(everything=True)
        copied.synchronize()
    if copied is None or blocking:
        return begin()
    work = Copying(copied, begin)
    with _copying_turn:
        _copying.append(work)
    begin_copied()
    return work


def begin_copied(until: Copying | None = None, everything: bool = False) -> None:
    """Has the engine asked for operations whose copies are there, in order; ``until``: waits for this one's."""
    with _copying_turn:
        while _copying and (everything or (until is not None and until in _copying) or nccl.platform.is_done(_copying[0].copied)):
            _copying.popleft().begin()


tensors.others.append(tensors.Way(holds, start, start_rows))


def finish() -> None:
    """Waits for all that is under way, on the host and on the GPU. Raises the first failure of the host's; the GPU's is noted."""
    begin_copied(everything=True)
    handles.finish()
    nccl.finish()


def forget_all() -> None:
    """As ``handles.forget_all``, also of what waits for a copy."""
    with _copying_turn:
        _copying.clear()
    handles.forget_all()
