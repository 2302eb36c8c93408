"""The backend ``collective`` of torch.distributed: the engine under DDP, FSDP, DTensor and whatever else speaks it.

    torch.distributed.init_process_group("collective")

A group of torch.distributed is a process set of the engine. Its members meet through the store that PyTorch gives them (store.py); the
default group of a process that has not called ``hvd.init()`` joins the job.
"""

from __future__ import annotations

import itertools
import time
from datetime import timedelta
from functools import partial
from typing import Any, Callable, Sequence

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from collective_core import _native
from collective_core.errors import CollectiveError
from collective_core.runtime import config, lifecycle, membership, operations, rendezvous
from collective_core.torch import handles
from collective_core.torch.distributed.point_to_point import PointToPoint, Transfer
from collective_core.torch.distributed.store import StoreLauncher
from collective_core.torch.distributed.work import Completer, MessageWork, Work, for_group
from collective_core.torch.ops.tensors import dtype_name, objection_to_tensor
from collective_core.transport import mpi
from collective_core_autoload import NAME, register

#: Process sets of groups have numbers from here on, so that they are none of hvd.add_process_set's.
FIRST_GROUP = 1 << 20

_REDUCTIONS = {
    dist.ReduceOp.SUM: _native.SUM,
    dist.ReduceOp.AVG: _native.AVERAGE,
    dist.ReduceOp.MIN: _native.MIN,
    dist.ReduceOp.MAX: _native.MAX,
    dist.ReduceOp.PRODUCT: _native.PRODUCT,
}
_BITWISE: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}
#: Reductions that a complex number's two parts do one by one.
_BY_PARTS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
_next_group = FIRST_GROUP
_groups: set[CollectiveGroup] = set()
_has_joined = False  # the job with a group

register()  # PyTorch before 2.5 does not look for backends itself


class CollectiveGroup(dist.ProcessGroup):
    """A process group over the engine. Ranks are the group's own."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        # Of operations, and of messages, which do not end in the order in which they began.
        self._completer, self._completer_of_messages = Completer(), Completer()
        self._me, self._ranks = rank, size
        self._name, self._description = "", ""
        self._numbers, self._barriers = itertools.count(1), 0
        settings = config.from_environment()
        seconds = timeout.total_seconds()
        seconds = settings.timeout if timeout == dist.default_pg_timeout or seconds <= 0 else seconds
        settings = settings._replace(timeout=seconds)
        is_first = not membership.is_initialized()
        # As other ranks may be long in coming to a later group, PyTorch's timeout holds for that.
        launcher = StoreLauncher(store, rank, size, min(seconds, settings.start_timeout) if is_first else seconds)
        self._set, peers = _join(launcher, settings)
        _groups.add(self)
        self._timeout, self._job_ranks = seconds, [peer.rank for peer in peers]
        self._point_to_point = PointToPoint(launcher, peers, self._set, seconds, settings.stall_warning)

    # --- what it is

    def getBackendName(self) -> str:
        return NAME

    def name(self) -> str:
        return NAME

    # By these names PyTorch asks a group that is written in Python.

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def rank(self) -> int:
        return self._me

    def size(self) -> int:
        return self._ranks

    def shutdown(self) -> None:
        """Leaves the group; with the last one the job, if a group has joined it."""
        global _has_joined
        self._point_to_point.end()
        self._completer.end()
        self._completer_of_messages.end()
        if self not in _groups:
            return
        _groups.remove(self)
        if self._set > 0 and membership.is_initialized():
            _native.close(self._set)
            mpi.leave(self._set)
        if not _groups and _has_joined:
            _has_joined = False
            lifecycle.shutdown()

    abort = shutdown

    # --- reductions

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        opts = _options(opts, c10d.AllreduceOptions)
        return self._group_of([self._allreduce(tensor, opts) for tensor in _listed(tensors)])

    allreduce_coalesced = allreduce

    def _allreduce(self, tensor: torch.Tensor, opts: Any, target: torch.Tensor | None = None) -> Work:
        target = tensor if target is None else target
        if tensor.is_sparse:
            return self._sum_sparse(tensor, opts)
        if _kind_of(opts.reduceOp) in _BITWISE and (tensor.is_floating_point() or tensor.is_complex()):
            return self._refused("all_reduce", f"{tensor.dtype} has no {_name_of(opts.reduceOp)}", opts)
        if _kind_of(opts.reduceOp) in _BITWISE:
            return self._reduce_gathered(tensor, target, _BITWISE[_kind_of(opts.reduceOp)], opts)
        source, reduce, scale, problem = self._prepared(tensor, opts.reduceOp)
        result = source if target is tensor else torch.empty_like(source)
        operation = self._operation(_native.ALLREDUCE, "all_reduce", source, result, problem, reduce=reduce, prescale=scale)
        return self._start(operation, opts, [target], partial(_bring, result, target), source)

    def reduce(self, tensors: Any, opts: Any = None, op: Any = dist.ReduceOp.SUM) -> Work:
        opts = _options(opts, c10d.ReduceOptions, op)
        is_root = self._me == opts.rootRank
        return self._group_of(
            [self._allreduce(tensor, opts, tensor if is_root else torch.empty_like(tensor)) for tensor in _listed(tensors)]
        )

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        opts, of_one = _options(opts, c10d.ReduceScatterOptions), torch.is_tensor(outputs)
        pairs = [(outputs, inputs)] if of_one else zip(outputs, inputs)
        return self._group_of([self._reduce_scatter_list(output, parts, opts) for output, parts in pairs])

    def _reduce_scatter_list(self, output: torch.Tensor, parts: list[torch.Tensor], opts: Any) -> Work:
        if len(parts) != self._ranks or parts[self._me].numel() != output.numel():
            problem = f"{len(parts)} parts cannot be scattered on {self._ranks} ranks, or this one's has not {output.numel()} elements"
            return self._refused("reduce_scatter", problem, opts)
        if len({part.numel() for part in parts}) == 1:
            return self._reduce_scatter(output, torch.stack([part.reshape(-1) for part in parts]), opts)
        # Parts of different lengths: their sum in one, of which each rank takes its own.
        flat = torch.cat([part.reshape(-1) for part in parts])
        begin = sum(part.numel() for part in parts[: self._me])
        work = self._allreduce(flat, opts)
        return self._then(work, [output], lambda: _copy(output, flat[begin : begin + output.numel()].view(output.shape)))

    def _reduce_scatter_base(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> Work:
        return self._reduce_scatter(output, source, _options(opts, c10d.ReduceScatterOptions))

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        opts = _options(opts, c10d.ReduceScatterOptions)
        return self._group_of([self._reduce_scatter(output, source, opts) for output, source in zip(outputs, inputs)])

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _reduce_scatter(self, output: torch.Tensor, whole: torch.Tensor, opts: Any) -> Work:
        if _kind_of(opts.reduceOp) in _BITWISE:
            summed = torch.empty_like(whole)
            work = self._reduce_gathered(whole, summed, _BITWISE[_kind_of(opts.reduceOp)], opts)
            return self._then(work, [output], lambda: _copy(output, summed.view(self._ranks, -1)[self._me].view(output.shape)))
        source, reduce, scale, problem = self._prepared(whole, opts.reduceOp)
        if output.numel() * self._ranks != whole.numel() or output.dtype != whole.dtype:
            problem = f"{whole.numel()} elements of {whole.dtype} cannot be scattered into {output.numel()} of {output.dtype} on each rank"
            source = source.new_zeros(self._ranks)
        rows = source.reshape(self._ranks, -1)
        target = _real(_host(output))
        operation = self._operation(_native.REDUCESCATTER, "reduce_scatter", rows, target, problem, reduce=reduce, prescale=scale)
        return self._start(operation, opts, [output], partial(_bring, target, output), rows)

    def _prepared(self, tensor: torch.Tensor, op: Any) -> tuple[torch.Tensor, int, float, str]:
        """What the engine reads, its reduction, the factor before it, and why it cannot (empty: it can)."""
        source, kind = _host(tensor), _kind_of(op)
        if tensor.is_complex():
            source = _real(source)
            if kind not in _BY_PARTS:
                return source, _native.SUM, 1.0, f"complex tensors have no {_name_of(op)}"
        if kind in _REDUCTIONS:
            return source, _REDUCTIONS[kind], 1.0, ""
        if kind == dist.ReduceOp.PREMUL_SUM:
            return source, _native.SUM, float(op.factor if hasattr(op, "factor") else op.__getstate__()[1]), ""
        return source, _native.SUM, 1.0, f"the backend {NAME} has no reduction {_name_of(op)}"

    def _reduce_gathered(self, tensor: torch.Tensor, target: torch.Tensor, combine: Callable[..., torch.Tensor], opts: Any) -> Work:
        everyone = torch.empty(self._ranks, *tensor.shape, dtype=tensor.dtype)
        work = self._gather_equal(everyone, tensor, opts)

        def finish() -> None:
            result = everyone[0]
            for other in everyone[1:]:
                result = combine(result, other)
            _copy(target, result)

        return self._then(work, [target], finish)

    def _sum_sparse(self, tensor: torch.Tensor, opts: Any) -> Work:
        if _kind_of(opts.reduceOp) != dist.ReduceOp.SUM:
            return self._refused("all_reduce", f"sparse tensors have no {_name_of(opts.reduceOp)}", opts)
        own = tensor.detach().coalesce().cpu()
        indices, values = own.indices().t().contiguous(), own.values().contiguous()
        if indices.numel() == 0:
            indices, values = indices.reshape(0, own.sparse_dim()), values.reshape(0, *own.shape[own.sparse_dim() :])
        of_indices = self._gather_rows(indices, opts)
        of_values = self._gather_rows(values, opts)

        def finish() -> None:
            total = torch.sparse_coo_tensor(of_indices.rows.t(), of_values.rows, tensor.shape).coalesce()
            with torch.no_grad():
                tensor.copy_(total)

        return self._then(self._group_of([of_indices.work, of_values.work]), [tensor], finish)

    # --- gathering and spreading

    def broadcast(self, tensors: Any, opts: Any = None) -> Work:
        opts = _options(opts, c10d.BroadcastOptions)
        return self._group_of([self._broadcast(tensor, opts.rootRank, opts) for tensor in _listed(tensors)])

    def _broadcast(self, tensor: torch.Tensor, root: int, opts: Any) -> Work:
        buffer = _host(tensor)
        seen = _bytes(buffer)
        operation = self._operation(_native.BROADCAST, "broadcast", seen, seen, root=root)
        return self._start(operation, opts, [tensor], partial(_bring, buffer, tensor), buffer)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        pairs = [(outputs, inputs)] if torch.is_tensor(inputs) else zip(outputs, inputs)
        return self._group_of([self._allgather(of_all, tensor, opts) for of_all, tensor in pairs])

    def _allgather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, opts: Any) -> Work:
        if len(outputs) != self._ranks:
            return self._refused("all_gather", f"{len(outputs)} tensors cannot take what {self._ranks} ranks send", opts)
        gathered = self._gather_rows(_bytes(_host(tensor)), opts)

        def finish() -> None:
            self._check_lengths([_length_of(output) for output in outputs], gathered)
            for output, part in zip(outputs, gathered.rows.split(gathered.lengths)):
                _copy(output, _of_bytes(part, output))

        return self._then(gathered.work, list(outputs), finish)

    def allgather_coalesced(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        by_input = [[of_rank[number] for of_rank in outputs] for number in range(len(inputs))]
        return self._group_of([self._allgather(of_all, tensor, opts) for of_all, tensor in zip(by_input, inputs)])

    def _allgather_base(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> Work:
        return self._gather_equal(output, source, opts)

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        return self._group_of([self._gather_equal(output, source, opts) for output, source in zip(outputs, inputs)])

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def _gather_equal(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Work:
        gathered = self._gather_rows(_bytes(_host(tensor)), opts)

        def finish() -> None:
            self._check_lengths([_length_of(tensor)] * self._ranks, gathered)
            if gathered.rows.numel() != _length_of(output):
                raise self._wrong(f"{gathered.rows.numel()} bytes of all ranks do not fit into a tensor of {_length_of(output)}")
            _copy(output, _of_bytes(gathered.rows, output))

        return self._then(gathered.work, [output], finish)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        opts = _options(opts, c10d.GatherOptions)
        mine, received = (inputs, outputs) if torch.is_tensor(inputs) else (inputs[0], outputs[0] if outputs else None)
        is_root = self._me == opts.rootRank
        return self._exchange([mine if rank == opts.rootRank else None for rank in range(self._ranks)], received if is_root else None, opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        opts = _options(opts, c10d.ScatterOptions)
        mine, parts = (outputs, inputs) if torch.is_tensor(outputs) else (outputs[0], inputs[0] if inputs else None)
        sent: Sequence[torch.Tensor | None] = list(parts or []) if self._me == opts.rootRank else [None] * self._ranks
        received = [mine if rank == opts.rootRank else None for rank in range(self._ranks)]
        return self._exchange(sent, received, opts)

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        return self._exchange(inputs, outputs, opts)

    def alltoall_base(
        self, output: torch.Tensor, source: torch.Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> Work:
        sent = list(source.split(input_splits)) if input_splits else list(source.chunk(self._ranks))
        received = list(output.split(output_splits)) if output_splits else list(output.chunk(self._ranks))
        return self._exchange(sent, received, opts, [output])

    all_to_all_single = alltoall_base

    def _exchange(
        self,
        sent: Sequence[torch.Tensor | None],
        received: Sequence[torch.Tensor | None] | None,
        opts: Any,
        results: list[torch.Tensor] | None = None,
    ) -> Work:
        """Sends a tensor to each rank, and receives one from each; None: nothing. Bytes travel: types and shapes are the program's."""
        wanted = [None] * self._ranks if received is None else received
        if len(sent) != self._ranks or len(wanted) != self._ranks:
            problem = f"{len(sent)} tensors to send and {len(wanted)} to receive into are not one for each of {self._ranks} ranks"
            return self._refused("all_to_all", problem, opts)
        parts = [torch.empty(0, dtype=torch.uint8) if part is None else _bytes(_host(part)) for part in sent]
        source = parts[0] if len(parts) == 1 else torch.cat(parts)
        splits = [part.numel() for part in parts]
        operation = self._operation(_native.ALLTOALL, "all_to_all", source, None, splits=splits)
        gathered = self._started_gather(operation, opts, source)

        def finish() -> None:
            self._check_lengths([0 if target is None else _length_of(target) for target in wanted], gathered)
            for target, part in zip(wanted, gathered.rows.split(gathered.lengths)):
                if target is not None:
                    _copy(target, _of_bytes(part, target))

        return self._then(gathered.work, results or [each for each in wanted if each is not None], finish)

    # --- barriers

    def barrier(self, opts: Any = None) -> Work:
        operation = _native.operation(_native.BARRIER, self._next_name("barrier"), "uint8", (), 0, process_set=self._set)
        return self._start(operation, opts, [], _nothing)

    def monitored_barrier(self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier at rank 0, which names the first rank (``wait_all_ranks``: all) that has not come in time. In Gloo's words."""
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else self._timeout if timeout is None else timeout
        end = time.monotonic() + seconds
        token = torch.zeros(1, dtype=torch.uint8)
        self._barriers += 1
        tag = -self._barriers  # programs' are not negative; a late message is not taken for the next barrier's
        if self._me > 0:
            came = f"Rank {self._me} successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0"
            sent, answer = self._point_to_point.send(token, 0, tag), self._point_to_point.receive(token.clone(), 0, tag)
            try:
                if self._wait_until(end, sent) and self._wait_until(end, answer):
                    return
            except CollectiveError as error:
                raise CollectiveError(f"{came}: {error}", error.kind, error.ranks) from error
            raise CollectiveError(f"{came}: it has not answered within {seconds:g} s", "timeout")
        if seconds <= 0:
            raise CollectiveError(f"Rank 0 timed out in monitoredBarrier after {seconds:g} s", "timeout")
        arrivals = [self._point_to_point.receive(token.clone(), rank, tag) for rank in range(1, self._ranks)]
        late: list[int] = []
        for rank, arrival in enumerate(arrivals, 1):
            if late and not wait_all_ranks:
                self._point_to_point.forget(arrival)
            elif not self._wait_until(end, arrival):
                late.append(rank)
        if late:
            who = f"Rank {late[0]}" if len(late) == 1 else f"Ranks {', '.join(map(str, late))}"
            raise CollectiveError(
                f"{who} failed to pass monitoredBarrier in {seconds:g} s", "timeout", [self._job_ranks[rank] for rank in late]
            )
        for answer in [self._point_to_point.send(token, rank, tag) for rank in range(1, self._ranks)]:
            answer.wait(max(0.0, end - time.monotonic()))

    def _wait_until(self, end: float, transfer: Transfer) -> bool:
        """Whether it is over by then; otherwise nobody waits for it any more."""
        if transfer.wait(max(0.0, end - time.monotonic())):
            return True
        self._point_to_point.forget(transfer)
        return False

    # --- between two ranks

    def send(self, tensors: list[torch.Tensor], destination: int, tag: int = 0) -> Work:
        (tensor,) = tensors
        buffer = _host(tensor)
        return self._under_way(self._point_to_point.send(_bytes(buffer), destination, tag), _nothing, [tensor])

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> Work:
        (tensor,) = tensors
        buffer = _host(tensor)
        return self._under_way(self._point_to_point.receive(_bytes(buffer), source, tag), partial(_bring, buffer, tensor), [tensor])

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> Work:
        return self.recv(tensors, -1, tag)

    def _under_way(self, transfer: Transfer, finish: Callable[[], None], tensors: list[torch.Tensor]) -> Work:
        name = f"a message (tag {transfer.tag}) from or to rank {transfer.other}"
        return MessageWork(self._completer_of_messages, name, transfer, finish, tensors)

    # --- running them

    def _next_name(self, kind: str) -> str:
        return f"{kind}.{next(self._numbers)}"

    def _operation(
        self, kind: int, name: str, source: torch.Tensor, target: torch.Tensor | None, problem: str = "", **rest: Any
    ) -> _native.Operation:
        """``problem``: why this rank cannot run it. Then all ranks raise that, and the group goes on."""
        target_address = 0 if target is None else target.data_ptr()
        return _native.operation(
            kind,
            self._next_name(name),
            dtype_name(source),
            tuple(source.shape),
            source.numel(),
            source.data_ptr(),
            target_address,
            process_set=self._set,
            objection=objection_to_tensor(source) or problem,
            **rest,
        )

    def _refused(self, name: str, problem: str, opts: Any) -> Work:
        nothing = torch.zeros(1)
        return self._start(self._operation(_native.ALLREDUCE, name, nothing, nothing, problem), opts, [], _nothing, nothing)

    def _start(
        self, operation: _native.Operation, opts: Any, tensors: list[torch.Tensor], finish: Callable[[], None], *memory: Any
    ) -> Work:
        if not getattr(opts, "asyncOp", True):
            try:
                operations.run(operation, *memory)
            except CollectiveError as error:
                raise for_group(error) from None
            finish()
            return self._done(tensors)
        return self._started(operation, _native.submit(operation), finish, tensors, memory)

    def _started(
        self,
        operation: _native.Operation,
        handle: int,
        finish: Callable[[], None],
        tensors: list[torch.Tensor],
        memory: Any,
        keeps_handle: bool = False,
    ) -> Work:
        # What it uses stays until the engine is done with it, whether or not anybody waits.
        started = handles.Work(handle, finish, (operation, finish, memory), keeps_handle)

        def wait_for(seconds: float) -> bool:
            try:
                return operations.wait(handle, operation, seconds)
            except CollectiveError as error:
                raise for_group(error) from None

        return Work(self._completer, str(operation.name.decode()), wait_for, started.result, tensors)

    def _done(self, tensors: list[torch.Tensor]) -> Work:
        work = Work(self._completer, "", lambda _: True, _nothing, tensors)
        work.is_completed()
        return work

    def _gather_rows(self, source: torch.Tensor, opts: Any) -> _Gathered:
        return self._started_gather(self._operation(_native.ALLGATHER, "all_gather", source, None), opts, source)

    def _started_gather(self, operation: _native.Operation, opts: Any, source: torch.Tensor) -> _Gathered:
        gathered = _Gathered()
        handle = _native.submit(operation, _native.QUEUED if getattr(opts, "asyncOp", True) else _native.BLOCKING)

        def finish() -> None:
            buffer, gathered.lengths = operations.take_received(handle, self._ranks)
            flat = torch.from_numpy(buffer) if buffer.size else torch.empty(0, dtype=torch.uint8)
            gathered.rows = flat.view(source.dtype).reshape(-1, *source.shape[1:])

        gathered.work = self._started(operation, handle, finish, [], source, keeps_handle=True)
        return gathered

    def _then(self, work: Work, tensors: list[torch.Tensor], finish: Callable[[], None]) -> Work:
        """Work whose result is made of another's."""

        def wait_for(seconds: float) -> bool:
            return work._complete(seconds) and work.wait()

        return Work(self._completer, work.name, wait_for, finish, tensors)

    def _group_of(self, works: list[Work]) -> Work:
        if len(works) == 1:
            return works[0]

        def wait_for(seconds: float) -> bool:
            for work in works:
                if not work._complete(seconds):
                    return False
            return all(work.wait() for work in works)

        tensors = [tensor for work in works for tensor in work.result()]
        return Work(self._completer, ", ".join(work.name for work in works), wait_for, _nothing, tensors)

    def _check_lengths(self, expected: list[int], gathered: _Gathered) -> None:
        for rank, (length, wanted) in enumerate(zip(gathered.lengths, expected)):
            if length != wanted:
                raise self._wrong(f"rank {rank} sent {length} bytes, and {wanted} are expected")

    def _wrong(self, what: str) -> CollectiveError:
        return CollectiveError(f"rank {self._me} of a group of {self._ranks}: {what}", "mismatch")


class _Gathered:
    """What an allgather or alltoall has received, when its work is done: rows, and how many from each rank."""

    work: Work
    rows: torch.Tensor
    lengths: list[int]


def _join(launcher: StoreLauncher, settings: config.Config) -> tuple[int, Sequence[_native.PeerInfo]]:
    """Makes the group's process set, with which a process that is in no job joins it; its number and its ranks."""
    global _next_group, _has_joined
    everyone = rendezvous.exchange_documents(launcher, _situation())
    if len({(each["job"], each["backend"]) for each in everyone}) > 1:
        raise CollectiveError("some ranks of the group have called hvd.init() and others have not, or not with the same ranks", "invalid")
    if not membership.is_initialized():
        world = dist.get_world_size() if dist.is_initialized() else launcher.size
        if launcher.size < world:
            text = f"the first group of the backend {NAME} has {launcher.size} of {world} ranks: make the default group one of it"
            raise CollectiveError(f"{text}, or call hvd.init() before", "invalid")
        if settings.backend == "mpi":
            raise CollectiveError("with COLLECTIVE_BACKEND=mpi call hvd.init() before init_process_group", "invalid")
        lifecycle.join_launcher(launcher, settings.timeout)
        _has_joined = True
        return 0, membership.current().peers
    number = max(each["next"] for each in everyone)
    _next_group = number + 1
    return number, rendezvous.meet(launcher, settings, number, numbers=[each["rank"] for each in everyone])


def _situation() -> dict[str, Any]:
    """What members of a group tell each other about the job that they are in."""
    if not membership.is_initialized():
        return {"job": 0, "backend": "", "next": _next_group, "rank": -1}
    member = membership.current()
    return {"job": member.size, "backend": member.config.backend, "next": _next_group, "rank": member.rank}


def _options(given: Any, kind: Any, op: Any = None) -> Any:
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


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if torch.is_tensor(tensors) else list(tensors)


def _nothing() -> None:
    pass


def _host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where the engine can read and write it in place, otherwise a contiguous copy in host memory."""
    return tensor.detach().cpu().resolve_conj().contiguous()


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def _of_bytes(data: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if data.numel() == 0:
        return torch.empty(like.shape, dtype=like.dtype)
    if data.storage_offset() % like.element_size():
        data = data.clone()
    return data.view(like.dtype).view(like.shape)


def _length_of(tensor: torch.Tensor) -> int:
    return int(tensor.numel() * tensor.element_size())


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    with torch.no_grad():
        target.copy_(source)


def _bring(buffer: torch.Tensor, target: torch.Tensor) -> None:
    """Copies a result to where it belongs, if it is not there."""
    if buffer.data_ptr() != target.data_ptr() or buffer.device != target.device:
        with torch.no_grad():
            _copy(target, torch.view_as_complex(buffer) if target.is_complex() and not buffer.is_complex() else buffer.view(target.shape))


def _kind_of(op: Any) -> Any:
    return getattr(op, "op", op)


def _name_of(op: Any) -> str:
    return str(_kind_of(op)).rsplit(".", 1)[-1]
