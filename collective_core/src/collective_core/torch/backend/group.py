"""A process group of torch.distributed over the engine."""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial
from typing import Any, Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist

from collective_core import _native, job
from collective_core.errors import CollectiveError
from collective_core.runtime import config, external, membership, prepared, rendezvous
from collective_core.runtime.point_to_point import PointToPoint, Transfer
from collective_core.torch import memory
from collective_core.torch.backend import cuda, exchanges, reducers, reductions
from collective_core.torch.backend.cuda import on_its_device
from collective_core.torch.backend.operations import Operations, nothing
from collective_core.torch.backend.store import StoreLauncher
from collective_core.torch.backend.tensors import as_bytes, copy_back, on_host
from collective_core.torch.backend.work import Completer, GroupWork, MessageWork
from collective_core.torch.compiling import untraced
from collective_core_autoload import NAME

#: Process sets of groups have numbers from here on, so that they are none of hvd.add_process_set's.
FIRST_GROUP = 1 << 20
_next_group = FIRST_GROUP
_groups: set[CollectiveGroup] = set()
_has_joined = False  # the job with a group


@untraced
class CollectiveGroup(dist.ProcessGroup):
    """A process group over the engine. Ranks are the group's own."""

    # What PyTorch asks of _get_backend(device) before it calls what goes with each.
    supports_splitting = supports_coalescing = supports_time_estimate = supports_shrinking = False

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        dist.ProcessGroup.__init__(self, rank, size)
        settings = config.from_environment()
        seconds = timeout.total_seconds()
        seconds = settings.timeout if timeout == dist.default_pg_timeout or seconds <= 0 else seconds
        settings = settings._replace(timeout=seconds)
        is_first = not membership.is_initialized()
        # As other ranks may be long in coming to a later group, PyTorch's timeout holds for that.
        launcher = StoreLauncher(store, rank, size, min(seconds, settings.start_timeout) if is_first else seconds)
        process_set, peers, self.why_no_nccl = _join(launcher, settings)
        self.operations = Operations(process_set, rank, size)
        # Messages do not end in the order in which they began, as operations do.
        self._completer_of_messages = Completer()
        self._store, self._name, self._description, self._monitored_barriers = store, "", "", 0
        _groups.add(self)
        self._timeout, self._job_ranks = seconds, [peer.rank for peer in peers]
        self.of_gpus: Any = None if self.why_no_nccl else cuda.make_group(store, rank, size, timedelta(seconds=seconds))
        self.reducers = reducers.Reducers()
        self._point_to_point = PointToPoint(launcher, peers, self.operations.set, seconds, settings.stall_warning)

    # --- what it is

    def getBackendName(self) -> str:
        return NAME

    name = getBackendName

    def _get_backend(self, device: torch.device) -> Any:
        """NCCL's of CUDA tensors that go through it; otherwise this, as a group that is written in Python has no backends below it."""
        if self.of_gpus is not None and device.type == "cuda":
            return self.of_gpus._get_backend(torch.device(cuda.platform.device))
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(each) for each in dist.Backend.backend_capability[NAME]]

    def get_group_store(self) -> Any:
        return self._store

    def _get_sequence_number_for_group(self) -> int:
        """How many operations this rank has begun."""
        return self.operations.newest

    # By these names PyTorch asks a group that is written in Python.

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name
        if self.of_gpus is not None:
            self.of_gpus._set_group_name(name)

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description
        if self.of_gpus is not None:
            self.of_gpus._set_group_desc(description)

    def rank(self) -> int:
        return self.operations.me

    def size(self) -> int:
        return self.operations.ranks

    def shutdown(self) -> None:
        """Leaves the group; with the last one the job, if a group has joined it."""
        self._leave(abort=not membership.is_healthy())

    def abort(self) -> None:
        """As :meth:`shutdown`, without waiting for what a GPU has under way."""
        self._leave(abort=True)

    def _leave(self, abort: bool) -> None:
        self._point_to_point.end()
        if self in _groups:
            _groups.remove(self)
            prepared.forget_all()  # whose calls keep what the group works with
            self._end_operations(abort)
        self.operations.completer.end()
        self._completer_of_messages.end()

    def _end_operations(self, abort: bool) -> None:
        global _has_joined
        if self.of_gpus is not None:
            cuda.end_group(self.of_gpus, abort)
        if self.operations.set > 0 and membership.is_initialized():
            _native.close(self.operations.set)
            external.leave(self.operations.set)
        if not _groups and _has_joined:
            _has_joined = False
            job.shutdown()

    # PyTorch calls these around operations that NCCL is to start together.

    def _start_coalescing(self, device: torch.device) -> None:
        if self._is_of_gpus(device):
            self.of_gpus._start_coalescing(device)
        else:
            self.operations.completer.collected = self._completer_of_messages.collected = {}

    def _end_coalescing(self, device: torch.device) -> Any:
        if self._is_of_gpus(device):
            return self.of_gpus._end_coalescing(device)
        works, self.operations.completer.collected, self._completer_of_messages.collected = self.operations.completer.collected, None, None
        return self.operations.group_of(list(works or ()))

    def _is_of_gpus(self, device: torch.device) -> bool:
        return self.of_gpus is not None and device.type == cuda.platform.device

    # FSDP2's buffers and DDP's buckets (memory.py)

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return bool(device.type == "cpu")

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A vector which other ranks of this host read where it lies; in ordinary memory where the engine has no room."""
        if device.type != "cpu":
            raise CollectiveError(f"the backend {NAME} has no memory of {device}", "invalid")
        return memory.allocate(size, dtype)

    # --- collectives (exchanges.py, reductions.py), by the names that PyTorch calls

    broadcast = on_its_device(exchanges.broadcast)
    allgather = on_its_device(exchanges.allgather)
    allgather_coalesced = on_its_device(exchanges.allgather_coalesced)
    _allgather_base = on_its_device(exchanges._allgather_base)
    allgather_into_tensor_coalesced = on_its_device(exchanges.allgather_into_tensor_coalesced)
    gather = on_its_device(exchanges.gather)
    scatter = on_its_device(exchanges.scatter)
    alltoall = on_its_device(exchanges.alltoall)
    alltoall_base = on_its_device(exchanges.alltoall_base)
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    all_to_all_single = alltoall_base
    allreduce = on_its_device(reductions.allreduce)
    allreduce_coalesced = on_its_device(reductions.allreduce_coalesced)
    reduce = on_its_device(reductions.reduce)
    reduce_scatter = on_its_device(reductions.reduce_scatter)
    _reduce_scatter_base = on_its_device(reductions._reduce_scatter_base)
    reduce_scatter_tensor_coalesced = on_its_device(reductions.reduce_scatter_tensor_coalesced)
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    # --- barriers

    def barrier(self, opts: Any = None) -> GroupWork:
        cuda.platform.finish(getattr(opts, "device", None))  # as with NCCL: what comes after it finds what came before done
        operation = _native.operation(
            _native.BARRIER, self.operations.next_name("barrier"), "uint8", (), 0, process_set=self.operations.set
        )
        return self.operations.start(operation, opts, [], nothing)

    def monitored_barrier(self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier at rank 0, which names the first rank (``wait_all_ranks``: all) that has not come in time. In Gloo's words."""
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else self._timeout if timeout is None else timeout
        end = time.monotonic() + seconds
        token = np.zeros(1, dtype=np.uint8)
        self._monitored_barriers += 1
        tag = -self._monitored_barriers  # programs' are not negative; a late message is not taken for the next barrier's
        if self.rank() > 0:
            came = f"Rank {self.rank()} successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0"
            sent, answer = self._point_to_point.send(token, 0, tag), self._point_to_point.receive(token.copy(), 0, tag)
            try:
                if self._wait_until(end, sent) and self._wait_until(end, answer):
                    return
            except CollectiveError as error:
                raise CollectiveError(f"{came}: {error}", error.kind, error.ranks) from error
            raise CollectiveError(f"{came}: it has not answered within {seconds:g} s", "timeout")
        if seconds <= 0:
            raise CollectiveError(f"Rank 0 timed out in monitoredBarrier after {seconds:g} s", "timeout")
        arrivals = [self._point_to_point.receive(token.copy(), rank, tag) for rank in range(1, self.size())]
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
        for answer in [self._point_to_point.send(token, rank, tag) for rank in range(1, self.size())]:
            answer.wait(max(0.0, end - time.monotonic()))

    def _wait_until(self, end: float, transfer: Transfer) -> bool:
        """Whether it is over by then; otherwise nobody waits for it any more."""
        if transfer.wait(max(0.0, end - time.monotonic())):
            return True
        self._point_to_point.forget(transfer)
        return False

    # --- between two ranks

    @on_its_device
    def send(self, tensors: list[torch.Tensor], destination: int, tag: int = 0) -> GroupWork:
        (tensor,) = tensors
        buffer = on_host(tensor)
        return self._under_way(self._point_to_point.send(as_bytes(buffer).numpy(), destination, tag), nothing, [tensor])

    @on_its_device
    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> GroupWork:
        (tensor,) = tensors
        buffer = on_host(tensor)
        return self._under_way(
            self._point_to_point.receive(as_bytes(buffer).numpy(), source, tag), partial(copy_back, buffer, tensor), [tensor]
        )

    @on_its_device
    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> GroupWork:
        return self.recv(tensors, -1, tag)

    def _under_way(self, transfer: Transfer, finish: Callable[[], None], tensors: list[torch.Tensor]) -> GroupWork:
        name = f"a message (tag {transfer.tag}) from or to rank {transfer.other}"
        return MessageWork(self._completer_of_messages, name, transfer, finish, tensors)


def _join(launcher: StoreLauncher, settings: config.Config) -> tuple[int, Sequence[_native.PeerInfo], str]:
    """Makes the group's process set, with which a process that is in no job joins it.

    Its number, its ranks, and why NCCL does not carry their CUDA tensors; empty if it does.
    """
    global _next_group, _has_joined
    everyone = rendezvous.exchange_documents(launcher, {**_situation(), "cuda": cuda.situation(settings.nccl)})
    if len({(each["job"], each["backend"]) for each in everyone}) > 1:
        raise CollectiveError("some ranks of the group have called hvd.init() and others have not, or not with the same ranks", "invalid")
    if not membership.is_initialized():
        world = dist.get_world_size() if dist.is_initialized() else launcher.size
        if launcher.size < world:
            text = f"the first group of the backend {NAME} has {launcher.size} of {world} ranks: make the default group one of it"
            raise CollectiveError(f"{text}, or call hvd.init() before", "invalid")
        if settings.backend == "mpi":
            raise CollectiveError("with COLLECTIVE_BACKEND=mpi call hvd.init() before init_process_group", "invalid")
        job.join_launcher(launcher, settings.timeout)
        _has_joined = True
        number, peers = 0, membership.current().peers
    else:
        number = max(each["next"] for each in everyone)
        _next_group = number + 1
        peers = rendezvous.meet(launcher, settings, number, numbers=[each["rank"] for each in everyone])
    problem = cuda.unsupported_reason([each["cuda"] for each in everyone], [(peer.host_id, peer.host_name) for peer in peers])
    if problem and settings.nccl == "on":
        raise CollectiveError(f"COLLECTIVE_NCCL=on, and NCCL cannot be used: {problem}", "invalid")
    return number, peers, problem


def _situation() -> dict[str, Any]:
    """What members of a group tell each other about the job that they are in."""
    if not membership.is_initialized():
        return {"job": 0, "backend": "", "next": _next_group, "rank": -1}
    member = membership.current()
    return {"job": member.size, "backend": member.config.backend, "next": _next_group, "rank": member.rank}
