"""Operations of a group: submitted to the engine, each as work of torch.distributed that ends when the engine has ended it."""

from __future__ import annotations

import itertools
from typing import Any, Callable

import torch

from collective_core import _native
from collective_core.errors import CollectiveError
from collective_core.runtime import operations, prepared
from collective_core.torch import handles
from collective_core.torch.backend.work import Completer, GroupWork, for_group
from collective_core.torch.compiling import untraced
from collective_core.torch.tensors import EXCHANGE_API, dtype_name, unsupported_tensor


def nothing() -> None:
    """What is left to do after an operation that has put its result where it belongs."""


def options_of(given: Any, kind: Any, op: Any = None) -> Any:
    """Options of this kind: as they were given, or those with this root or reduction, or the usual ones."""
    if type(given).__name__.endswith("Options"):
        return given
    made = kind()
    if isinstance(given, int):
        made.rootRank = given
    elif given is not None:
        made.reduceOp = given
    if op is not None:
        made.reduceOp = op
    return made


class Gathered:
    """Rows that an allgather or alltoall has received, when its work is done, and how many from each rank."""

    work: GroupWork
    rows: torch.Tensor
    lengths: list[int]


@untraced
class Operations:
    """A group's operations. ``process_set``: the engine's; ``me``: this rank of the group's ``ranks``."""

    def __init__(self, process_set: int, me: int, ranks: int) -> None:
        self.set, self.me, self.ranks = process_set, me, ranks
        self.completer = Completer()
        self._numbers = itertools.count(1)

    @property
    def newest(self) -> int:
        """The number of the latest operation."""
        return int(repr(self._numbers)[len("count(") : -1]) - 1

    def next_name(self, kind: str) -> str:
        return f"{kind}.{next(self._numbers)}"

    def run_prepared(self, tensor: torch.Tensor, reduce: int) -> bool:
        """Whether there is a prepared call of it, which has run."""
        fault = _native.run_prepared(tensor, self, reduce)
        if fault:
            try:
                operations.check_prepared(fault, tensor)
            except CollectiveError as error:
                raise for_group(error) from None
        return fault is not None

    def prepare(self, tensor: torch.Tensor, reduce: int, operation: _native.Operation, name: str) -> None:
        operation.name = f"{name}.".encode()
        prepared.note(tensor, (self, reduce), operation, self._numbers, EXCHANGE_API)

    def operation(
        self, kind: int, name: str, source: torch.Tensor, target: torch.Tensor | None, problem: str = "", **rest: Any
    ) -> _native.Operation:
        """``problem``: why this rank cannot run it. Then all ranks raise that, and the group goes on."""
        target_address = 0 if target is None else target.data_ptr()
        return _native.operation(
            kind,
            self.next_name(name),
            dtype_name(source),
            tuple(source.shape),
            source.numel(),
            source.data_ptr(),
            target_address,
            process_set=self.set,
            unsupported_reason=unsupported_tensor(source) or problem,
            **rest,
        )

    def refused(self, name: str, problem: str, opts: Any) -> GroupWork:
        token = torch.zeros(1)
        return self.start(self.operation(_native.ALLREDUCE, name, token, token, problem), opts, [], nothing, token)

    def start(
        self, operation: _native.Operation, opts: Any, tensors: list[torch.Tensor], finish: Callable[[], None], *memory: Any
    ) -> GroupWork:
        if not getattr(opts, "asyncOp", True):
            try:
                operations.run(operation, *memory)
            except CollectiveError as error:
                raise for_group(error) from None
            finish()
            return self.done(tensors)
        return self._started(operation, _native.submit(operation), finish, tensors, memory)

    def _started(
        self,
        operation: _native.Operation,
        handle: int,
        finish: Callable[[], None],
        tensors: list[torch.Tensor],
        memory: Any,
        keeps_handle: bool = False,
    ) -> GroupWork:
        # What it uses stays until the engine is done with it, whether or not anybody waits.
        started = handles.Work(handle, finish, (operation, finish, memory), keeps_handle)

        def wait_for(seconds: float) -> bool:
            try:
                return operations.wait(handle, operation, seconds)
            except CollectiveError as error:
                raise for_group(error) from None

        return GroupWork(self.completer, str(operation.name.decode()), wait_for, started.result, tensors)

    def done(self, tensors: list[torch.Tensor]) -> GroupWork:
        work = GroupWork(self.completer, "", lambda _: True, nothing, tensors)
        work.is_completed()
        return work

    def gather_rows(self, source: torch.Tensor, opts: Any, target: torch.Tensor | None = None) -> Gathered:
        """``target``: memory for what all ranks send, if all send as much as this one. Where the rows then lie, the caller sees."""
        return self.started_gather(self.operation(_native.ALLGATHER, "all_gather", source, target), opts, source, target)

    def started_gather(self, operation: _native.Operation, opts: Any, source: torch.Tensor, target: torch.Tensor | None = None) -> Gathered:
        gathered = Gathered()
        handle = _native.submit(operation, _native.QUEUED if getattr(opts, "asyncOp", True) else _native.BLOCKING)

        def finish() -> None:
            buffer, gathered.lengths = operations.take_received(handle, self.ranks)
            flat = torch.from_numpy(buffer) if buffer.size else torch.empty(0, dtype=torch.uint8)
            gathered.rows = flat.view(source.dtype).reshape(-1, *source.shape[1:])

        gathered.work = self._started(operation, handle, finish, [], (source, target), keeps_handle=True)
        return gathered

    def then(self, work: GroupWork, tensors: list[torch.Tensor], finish: Callable[[], None]) -> GroupWork:
        """Work whose result is made of another's."""

        def wait_for(seconds: float) -> bool:
            return work._complete(seconds) and work.wait()

        return GroupWork(self.completer, work.name, wait_for, finish, tensors)

    def group_of(self, works: list[GroupWork]) -> GroupWork:
        if len(works) == 1:
            return works[0]

        def wait_for(seconds: float) -> bool:
            for work in works:
                if not work._complete(seconds):
                    return False
            return all(work.wait() for work in works)

        tensors = [tensor for work in works for tensor in work.result()]
        return GroupWork(self.completer, ", ".join(work.name for work in works), wait_for, nothing, tensors)

    def check_lengths(self, expected: list[int], gathered: Gathered) -> None:
        for rank, (length, wanted) in enumerate(zip(gathered.lengths, expected)):
            if length != wanted:
                raise self.wrong(f"rank {rank} sent {length} bytes, and {wanted} are expected")

    def wrong(self, what: str) -> CollectiveError:
        return CollectiveError(f"rank {self.me} of a group of {self.ranks}: {what}", "mismatch")
