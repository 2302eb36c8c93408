"""Exchanges of unchanged data between a group's ranks: broadcast, allgather, gather, scatter, alltoall."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Sequence

import torch
from torch._C import _distributed_c10d as c10d

from collective_core import _native
from collective_core.torch.backend.operations import options_of
from collective_core.torch.backend.tensors import as_bytes, copy_back, copy_into, from_bytes, length_of, listed, on_host
from collective_core.torch.backend.work import GroupWork

if TYPE_CHECKING:
    from collective_core.torch.backend.group import CollectiveGroup


def broadcast(group: CollectiveGroup, tensors: Any, opts: Any = None) -> GroupWork:
    opts = options_of(opts, c10d.BroadcastOptions)
    return group.operations.group_of([_broadcast(group, tensor, opts.rootRank, opts) for tensor in listed(tensors)])


def _broadcast(group: CollectiveGroup, tensor: torch.Tensor, root: int, opts: Any) -> GroupWork:
    buffer = on_host(tensor)
    seen = as_bytes(buffer)
    operation = group.operations.operation(_native.BROADCAST, "broadcast", seen, seen, root=root)
    # .data: as with PyTorch's own backends the tensor's version stays: distribute_tensor broadcasts parameters that have views.
    return group.operations.start(operation, opts, [tensor], partial(copy_back, buffer, tensor.data), buffer)


def allgather(group: CollectiveGroup, outputs: Any, inputs: Any, opts: Any = None) -> GroupWork:
    pairs = [(outputs, inputs)] if torch.is_tensor(inputs) else zip(outputs, inputs)
    return group.operations.group_of([_allgather(group, of_all, tensor, opts) for of_all, tensor in pairs])


def _allgather(group: CollectiveGroup, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, opts: Any) -> GroupWork:
    if len(outputs) != group.size():
        return group.operations.refused("all_gather", f"{len(outputs)} tensors cannot take what {group.size()} ranks send", opts)
    gathered = group.operations.gather_rows(as_bytes(on_host(tensor)), opts)

    def finish() -> None:
        group.operations.check_lengths([length_of(output) for output in outputs], gathered)
        for output, part in zip(outputs, gathered.rows.split(gathered.lengths)):
            copy_into(output, from_bytes(part, output))

    return group.operations.then(gathered.work, list(outputs), finish)


def allgather_coalesced(
    group: CollectiveGroup, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
) -> GroupWork:
    by_input = [[of_rank[number] for of_rank in outputs] for number in range(len(inputs))]
    return group.operations.group_of([_allgather(group, of_all, tensor, opts) for of_all, tensor in zip(by_input, inputs)])


def _allgather_base(group: CollectiveGroup, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> GroupWork:
    return gather_equal(group, output, source, opts)


def allgather_into_tensor_coalesced(
    group: CollectiveGroup, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
) -> GroupWork:
    return group.operations.group_of([gather_equal(group, output, source, opts) for output, source in zip(outputs, inputs)])


def gather_equal(group: CollectiveGroup, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> GroupWork:
    source = as_bytes(on_host(tensor))
    # FSDP gathers in place: its input is this rank's part of the output.
    is_own_part = output.data_ptr() + group.rank() * source.numel() == source.data_ptr()
    is_plain = output.device.type == "cpu" and output.is_contiguous() and not output.is_neg()
    takes_it = is_plain and length_of(output) == group.size() * source.numel()
    in_place = takes_it and (is_own_part or not _overlap(as_bytes(output), source))
    gathered = group.operations.gather_rows(source, opts, as_bytes(output) if in_place else None)

    def finish() -> None:
        group.operations.check_lengths([length_of(tensor)] * group.size(), gathered)
        if gathered.rows.data_ptr() == output.data_ptr():
            return
        if gathered.rows.numel() != length_of(output):
            raise group.operations.wrong(f"{gathered.rows.numel()} bytes of all ranks do not fit into a tensor of {length_of(output)}")
        copy_into(output, from_bytes(gathered.rows, output))

    return group.operations.then(gathered.work, [output], finish)


def gather(group: CollectiveGroup, outputs: Any, inputs: Any, opts: Any = None) -> GroupWork:
    opts = options_of(opts, c10d.GatherOptions)
    mine, received = (inputs, outputs) if torch.is_tensor(inputs) else (inputs[0], outputs[0] if outputs else None)
    is_root = group.rank() == opts.rootRank
    return _exchange(group, [mine if rank == opts.rootRank else None for rank in range(group.size())], received if is_root else None, opts)


def scatter(group: CollectiveGroup, outputs: Any, inputs: Any, opts: Any = None) -> GroupWork:
    opts = options_of(opts, c10d.ScatterOptions)
    mine, parts = (outputs, inputs) if torch.is_tensor(outputs) else (outputs[0], inputs[0] if inputs else None)
    sent: Sequence[torch.Tensor | None] = list(parts or []) if group.rank() == opts.rootRank else [None] * group.size()
    received = [mine if rank == opts.rootRank else None for rank in range(group.size())]
    return _exchange(group, sent, received, opts)


def alltoall(group: CollectiveGroup, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> GroupWork:
    return _exchange(group, inputs, outputs, opts)


def alltoall_base(
    group: CollectiveGroup, output: torch.Tensor, source: torch.Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
) -> GroupWork:
    sent = list(source.split(input_splits)) if input_splits else list(source.chunk(group.size()))
    received = list(output.split(output_splits)) if output_splits else list(output.chunk(group.size()))
    return _exchange(group, sent, received, opts, [output])


def _exchange(
    group: CollectiveGroup,
    sent: Sequence[torch.Tensor | None],
    received: Sequence[torch.Tensor | None] | None,
    opts: Any,
    results: list[torch.Tensor] | None = None,
) -> GroupWork:
    """Sends a tensor to each rank, and receives one from each; None: nothing. Bytes travel: types and shapes are the program's."""
    wanted = [None] * group.size() if received is None else received
    if len(sent) != group.size() or len(wanted) != group.size():
        problem = f"{len(sent)} tensors to send and {len(wanted)} to receive into are not one for each of {group.size()} ranks"
        return group.operations.refused("all_to_all", problem, opts)
    parts = [torch.empty(0, dtype=torch.uint8) if part is None else as_bytes(on_host(part)) for part in sent]
    source = parts[0] if len(parts) == 1 else torch.cat(parts)
    splits = [part.numel() for part in parts]
    operation = group.operations.operation(_native.ALLTOALL, "all_to_all", source, None, splits=splits)
    gathered = group.operations.started_gather(operation, opts, source)

    def finish() -> None:
        group.operations.check_lengths([0 if target is None else length_of(target) for target in wanted], gathered)
        for target, part in zip(wanted, gathered.rows.split(gathered.lengths)):
            if target is not None:
                copy_into(target, from_bytes(part, target))

    return group.operations.then(gathered.work, results or [each for each in wanted if each is not None], finish)


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of bytes share memory."""
    return bool(one.data_ptr() < other.data_ptr() + other.numel() and other.data_ptr() < one.data_ptr() + one.numel())
