"""CUDA tensors through NCCL: the collectives where the tensors lie, on a stream of our own, without waiting for the GPU.

The ranks agree on an operation on the host, as on every other; then each puts it on its stream (nccl_transport.py), which first waits
for what the caller's stream had to do (an event). The operation counts as done when it is under way; taking its result makes the caller's
stream wait for another event. So the host never waits for the GPU, and work on the GPU keeps the order of the program.

NCCL is used when COLLECTIVE_NCCL asks for it, in a process set whose members all have a GPU and the same NCCL, which they tell each other
when the set is made (runtime/rendezvous.py). Otherwise, and for what NCCL does not know, CUDA tensors go through host memory.

Two ranks on one GPU cannot use NCCL. The ranks compare their GPUs before the first operation; then all go through host memory.
"""

from __future__ import annotations

import warnings
from typing import Any, Callable, Sequence

import numpy as np
import torch

from collective_core import _native, arrays
from collective_core.arrays import Average, Max, Min, Product, Sum
from collective_core.errors import CollectiveError
from collective_core.runtime import operations, rendezvous
from collective_core.runtime.process_sets import Members, ProcessSet, members, process_set_by_id
from collective_core.torch import nccl_transport, nccl_watchdog
from collective_core.torch.handles import Work
from collective_core.torch.nccl_transport import Launch, Set, sets
from collective_core.transport import nccl

#: Bytes of a GPU's name that are compared.
GPU_NAME = 64


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
    old = sets.pop(process_set, None)
    library = nccl.library()
    nccl_watchdog.forget(process_set)
    communicator = old.retire("its process set was made anew") if old is not None else 0
    if communicator and library is not None:
        library.destroy(communicator)
    if library is None or len(offers) < 2 or any(not other or other["version"] != offers[0]["version"] for other in offers):
        return
    sets[process_set] = Set(process_set, bytes.fromhex(offers[0]["id"]), len(offers), rank)
    _native.use_transport(nccl_transport.start, nccl_transport.test, device=_native.GPU_MEMORY)


rendezvous.companions["nccl"] = (offer, learn)


def is_used(process_set: ProcessSet | None = None) -> bool:
    """Whether CUDA tensors of the set go through NCCL."""
    return members(process_set).id in sets


def reduces_with_nccl(tensor: torch.Tensor, op: str, prescale: float, postscale: float, who: Members) -> bool:
    """Whether such a reduction goes through NCCL: the same on all ranks that ask for the same. Fractions of integers do not."""
    if not moves_with_nccl(tensor, who):
        return False
    known = str(tensor.dtype).replace("torch.", "") in nccl.TYPES
    plain = op in (Sum, Min, Max, Product) and prescale == 1.0 and postscale == 1.0
    return known and (plain or (tensor.is_floating_point() and op in (Sum, Average)))


def moves_with_nccl(tensor: torch.Tensor, who: Members) -> bool:
    """Whether NCCL moves this tensor in this set. Collective at the set's first tensor on a GPU."""
    if tensor.is_cuda and who.id in sets and not sets[who.id].compared:
        _compare_gpus(tensor.device, who)
    return tensor.is_cuda and who.id in sets and tensor.layout is torch.strided


def _compare_gpus(device: torch.device, who: Members) -> None:
    mine = str(getattr(torch.cuda.get_device_properties(device), "uuid", f"unknown, of rank {who.rank}"))
    row = np.frombuffer(mine.encode()[:GPU_NAME].ljust(GPU_NAME), dtype=np.uint8).reshape(1, GPU_NAME)
    try:
        rows = arrays.allgather_without_joined(row, f"the first CUDA tensor of process set {who.id}", process_set_by_id(who.id))
    except CollectiveError as error:
        if error.kind != "mismatch":
            raise
        text = f"at the first CUDA tensor the ranks compare their GPUs, so all ranks begin with one; some did something else: {error}"
        raise CollectiveError(text, error.kind, error.ranks) from error
    sets[who.id].compared = True
    shared = ranks_that_share([bytes(row) for row in rows])
    if shared:
        del sets[who.id]
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
    _note(launch, asked, who)

    def finish() -> torch.Tensor:
        launch.hand_over()
        if not in_place:
            with torch.no_grad():
                output.copy_(target)
        return output

    if blocking:
        operations.run(asked)
        return Work(0, finish)
    return Work(_native.submit(asked), finish, (source, target, asked, launch))


def start_rows(source: torch.Tensor, asked: _native.Operation, who: Members, blocking: bool) -> Work:
    """Starts an allgather or alltoall of ``source``, which is contiguous. ``asked``: of the engine, from its address.

    The result of the work is the tensor received and the rows from each rank.
    """
    launch = Launch(source, None)
    _note(launch, asked, who)
    handle = _native.submit(asked, _native.BLOCKING if blocking else _native.QUEUED)

    def finish() -> tuple[torch.Tensor, list[int]]:
        _, rows = operations.take_received(handle, who.size)
        received = launch.hand_over()
        return source.new_empty((sum(rows), *source.shape[1:])) if received is None else received, rows

    return Work(handle, finish, (source, asked, launch), keeps_handle=True)


def _note(launch: Launch, asked: _native.Operation, who: Members) -> None:
    """Where the transport finds it when all have agreed."""
    asked.tag = launch.tag
    sets[who.id].asked[launch.tag] = launch
