"""What a group's ranks send each other unchanged: broadcast, allgather, gather, scatter, alltoall."""

from __future__ import annotations

from functools import partial
from typing import Any, Sequence

import torch
from torch._C import _distributed_c10d as c10d

from collective_core import _native
from collective_core.torch.compiling import untraced
from collective_core.torch.distributed.cuda import on_its_device
from collective_core.torch.distributed.operations import Operations, options_of
from collective_core.torch.distributed.tensors import as_bytes, bring_home, copy_into, from_bytes, length_of, listed, on_host
from collective_core.torch.distributed.work import Work


@untraced
class Exchanges(Operations):
    """Bytes travel: types and shapes are the program's."""

    @on_its_device
    def broadcast(self, tensors: Any, opts: Any = None) -> Work:
        opts = options_of(opts, c10d.BroadcastOptions)
        return self._group_of([self._broadcast(tensor, opts.rootRank, opts) for tensor in listed(tensors)])

    def _broadcast(self, tensor: torch.Tensor, root: int, opts: Any) -> Work:
        buffer = on_host(tensor)
        seen = as_bytes(buffer)
        operation = self._operation(_native.BROADCAST, "broadcast", seen, seen, root=root)
        # .data: as with PyTorch's own backends the tensor's version stays: distribute_tensor broadcasts parameters that have views.
        return self._start(operation, opts, [tensor], partial(bring_home, buffer, tensor.data), buffer)

    @on_its_device
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        pairs = [(outputs, inputs)] if torch.is_tensor(inputs) else zip(outputs, inputs)
        return self._group_of([self._allgather(of_all, tensor, opts) for of_all, tensor in pairs])

    def _allgather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, opts: Any) -> Work:
        if len(outputs) != self._ranks:
            return self._refused("all_gather", f"{len(outputs)} tensors cannot take what {self._ranks} ranks send", opts)
        gathered = self._gather_rows(as_bytes(on_host(tensor)), opts)

        def finish() -> None:
            self._check_lengths([length_of(output) for output in outputs], gathered)
            for output, part in zip(outputs, gathered.rows.split(gathered.lengths)):
                copy_into(output, from_bytes(part, output))

        return self._then(gathered.work, list(outputs), finish)

    @on_its_device
    def allgather_coalesced(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        by_input = [[of_rank[number] for of_rank in outputs] for number in range(len(inputs))]
        return self._group_of([self._allgather(of_all, tensor, opts) for of_all, tensor in zip(by_input, inputs)])

    @on_its_device
    def _allgather_base(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> Work:
        return self._gather_equal(output, source, opts)

    all_gather_single = _allgather_base

    @on_its_device
    def allgather_into_tensor_coalesced(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        return self._group_of([self._gather_equal(output, source, opts) for output, source in zip(outputs, inputs)])

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def _gather_equal(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Work:
        source = as_bytes(on_host(tensor))
        # FSDP gathers in place: its input is this rank's part of the output.
        is_own_part = output.data_ptr() + self._me * source.numel() == source.data_ptr()
        is_plain = output.device.type == "cpu" and output.is_contiguous() and not output.is_neg()
        takes_it = is_plain and length_of(output) == self._ranks * source.numel()
        in_place = takes_it and (is_own_part or not _overlap(as_bytes(output), source))
        gathered = self._gather_rows(source, opts, as_bytes(output) if in_place else None)

        def finish() -> None:
            self._check_lengths([length_of(tensor)] * self._ranks, gathered)
            if gathered.rows.data_ptr() == output.data_ptr():
                return
            if gathered.rows.numel() != length_of(output):
                raise self._wrong(f"{gathered.rows.numel()} bytes of all ranks do not fit into a tensor of {length_of(output)}")
            copy_into(output, from_bytes(gathered.rows, output))

        return self._then(gathered.work, [output], finish)

    @on_its_device
    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        opts = options_of(opts, c10d.GatherOptions)
        mine, received = (inputs, outputs) if torch.is_tensor(inputs) else (inputs[0], outputs[0] if outputs else None)
        is_root = self._me == opts.rootRank
        return self._exchange([mine if rank == opts.rootRank else None for rank in range(self._ranks)], received if is_root else None, opts)

    @on_its_device
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        opts = options_of(opts, c10d.ScatterOptions)
        mine, parts = (outputs, inputs) if torch.is_tensor(outputs) else (outputs[0], inputs[0] if inputs else None)
        sent: Sequence[torch.Tensor | None] = list(parts or []) if self._me == opts.rootRank else [None] * self._ranks
        received = [mine if rank == opts.rootRank else None for rank in range(self._ranks)]
        return self._exchange(sent, received, opts)

    @on_its_device
    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        return self._exchange(inputs, outputs, opts)

    @on_its_device
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
        parts = [torch.empty(0, dtype=torch.uint8) if part is None else as_bytes(on_host(part)) for part in sent]
        source = parts[0] if len(parts) == 1 else torch.cat(parts)
        splits = [part.numel() for part in parts]
        operation = self._operation(_native.ALLTOALL, "all_to_all", source, None, splits=splits)
        gathered = self._started_gather(operation, opts, source)

        def finish() -> None:
            self._check_lengths([0 if target is None else length_of(target) for target in wanted], gathered)
            for target, part in zip(wanted, gathered.rows.split(gathered.lengths)):
                if target is not None:
                    copy_into(target, from_bytes(part, target))

        return self._then(gathered.work, results or [each for each in wanted if each is not None], finish)


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of bytes share memory."""
    return bool(one.data_ptr() < other.data_ptr() + other.numel() and other.data_ptr() < one.data_ptr() + one.numel())
