"""Exchange of rows, to the ranks that use them, and of gradients, to the ranks that hold the rows.

Row-wise (and table-wise), n ranks, U distinct rows used by a rank, D columns of b bytes: an alltoall of 8·(U + n) bytes of positions and
one of U·D·b bytes back; for gradients 8·(U + n) + U·D·b. Column-wise all ranks' positions go to all ranks, 8·(U + 1)·n, and the rows as
before. Each part of positions begins with a marker, so that a rank that has called join(), which sends nothing, differs from one that
needs no rows.

Whatever comes from several ranks is in the order of the ranks, which is the order in which gradients are summed.
"""

from __future__ import annotations

from typing import Any, Callable

import torch

from collective_core import _native
from collective_core.errors import CollectiveError
from collective_core.extensions.sparse.sharding import COLUMN_WISE, Placement
from collective_core.runtime import membership
from collective_core.runtime.process_sets import ProcessSet, members_of
from collective_core.torch.handles import results_of
from collective_core.torch.ops import allreduce
from collective_core.torch.tensors import describe
from collective_core.torch.ways import start_rows

#: Positions of this rank's rows to the rows; with counts, a row of both for each.
Read = Callable[[torch.Tensor], torch.Tensor]
#: Waits for the gradients of this rank's rows: their positions, and their gradients.
Received = Callable[[], "tuple[torch.Tensor, torch.Tensor]"]


class RowExchange:
    """Exchange of rows that one rank each holds."""

    def __init__(self, placement: Placement, name: str, process_set: ProcessSet | None) -> None:
        self.placement = placement
        self._name = name
        self._process_set = process_set
        self._who = members_of(process_set)

    def _start(self, kind: int, tensor: torch.Tensor, what: str, splits: list[int] | None, blocking: bool, problem: str = "") -> Any:
        asked = describe(kind, tensor, f"{self._name}.{what}", self._who.id, problem, splits=splits)
        return start_rows(asked, tensor, blocking, self._who.size)

    def _alltoall(self, tensor: torch.Tensor, what: str, splits: list[int], blocking: bool = True, problem: str = "") -> Any:
        return self._start(_native.ALLTOALL, tensor, what, splits, blocking, problem)

    def _splits(self, positions: torch.Tensor) -> list[int]:
        """How many of the positions, which are ascending, are each rank's."""
        firsts = torch.tensor(self.placement.row_bounds[:-1], device=positions.device)
        ends = [*torch.searchsorted(positions, firsts).tolist(), len(positions)]
        return [end - begin for begin, end in zip(ends, ends[1:])]

    def _start_positions(self, positions: torch.Tensor, what: str, blocking: bool, problem: str = "") -> Any:
        """Starts what brings positions to the ranks that hold them; in two dimensions, the first number of each row is one."""
        splits = self._splits(positions if positions.dim() == 1 else positions[:, 0].contiguous())
        marker = positions.new_zeros(1, *positions.shape[1:])
        marked = torch.cat([part for mine in positions.split(splits) for part in (marker, mine)])
        return self._alltoall(marked, what, [count + 1 for count in splits], blocking, problem)

    def _without_markers(self, received: torch.Tensor, counts: list[int]) -> tuple[torch.Tensor, list[int]]:
        """The positions that came, and how many from each rank. Raises :class:`CollectiveError`, on all ranks that have not joined."""
        joined = [rank for rank, count in zip(self._who.ranks, counts) if not count]
        if joined:
            raise CollectiveError(
                f"{self._name}: rank {', '.join(map(str, joined))} has called join(), and its rows with it are out of reach. "
                "With sharded tables every rank takes every step; give one without data an empty batch",
                "invalid",
                joined,
            )
        return torch.cat([part[1:] for part in received.split(counts)]), [count - 1 for count in counts]

    def _start_rows(self, read: Read, asked: torch.Tensor, splits: list[int]) -> Any:
        """Starts what brings rows that were asked for. Where this rank cannot read them, every rank raises why, and none waits."""
        try:
            rows = read(asked)
        except Exception as error:  # noqa: BLE001 - raised on every rank
            problem = f"{self._name}: rank {membership.rank()} cannot read its rows: {type(error).__name__}: {error}"
            return self._alltoall(torch.empty(0), "rows", [0] * self._who.size, problem=problem)
        return self._alltoall(rows, "rows", splits)

    def lookup(self, positions: torch.Tensor, read: Read, problem: str, occurrences: torch.Tensor | None = None) -> torch.Tensor:
        """The rows at these positions, which are ascending and distinct. ``problem``: why this rank cannot; then every rank raises it.

        ``occurrences``: how often each occurs, which their owners are told.
        """
        request = positions if occurrences is None else torch.stack([positions, occurrences], 1)
        if self._who.size == 1 and not problem:
            return read(request)
        asked, counts = self._without_markers(*self._start_positions(request, "lookup", True, problem).result())
        found, _ = self._start_rows(read, asked, counts).result()
        return torch.as_tensor(found)

    def send_gradients(self, positions: torch.Tensor, gradients: torch.Tensor, blocking: bool) -> Received:
        if self._who.size == 1:
            return lambda: (positions, gradients)
        works = [
            self._start_positions(positions, "gradients.rows", blocking),
            self._alltoall(gradients, "gradients", self._splits(positions), blocking),
        ]

        def receive() -> tuple[torch.Tensor, torch.Tensor]:
            asked, (values, _) = results_of([work.result for work in works])
            return self._without_markers(*asked)[0], values

        return receive

    def row_mean(self, values: torch.Tensor) -> torch.Tensor:
        """Means over whole rows, with one column."""
        return values.mean(1, keepdim=True)


class ColumnExchange(RowExchange):
    """Exchange of rows of which every rank holds some columns."""

    def _start_positions(self, positions: torch.Tensor, what: str, blocking: bool, problem: str = "") -> Any:
        return self._start(_native.ALLGATHER, torch.cat([positions.new_zeros(1), positions]), what, None, blocking, problem)

    def _widths(self) -> list[int]:
        return [end - first for first, end in self.placement.column_ranges]

    def lookup(self, positions: torch.Tensor, read: Read, problem: str, occurrences: torch.Tensor | None = None) -> torch.Tensor:  # noqa: ARG002
        if self._who.size == 1 and not problem:
            return read(positions)
        asked, counts = self._without_markers(*self._start_positions(positions, "lookup", True, problem).result())
        width = self._widths()[self._who.rank]
        # Widths may differ between ranks, so that the rows of all travel as one row of numbers.
        columns, _ = self._start_rows(lambda rows: read(rows).reshape(-1), asked, [count * width for count in counts]).result()
        wanted = len(positions)
        parts = columns.split([wanted * width for width in self._widths()])
        return torch.cat([part.view(wanted, width) for part, width in zip(parts, self._widths())], 1)

    def send_gradients(self, positions: torch.Tensor, gradients: torch.Tensor, blocking: bool) -> Received:
        if self._who.size == 1:
            return lambda: (positions, gradients)
        ranks = range(self._who.size)
        flat = torch.cat([gradients[:, self.placement.columns_of(rank)].reshape(-1) for rank in ranks])
        splits = [len(positions) * width for width in self._widths()]
        works = [
            self._start_positions(positions, "gradients.rows", blocking),
            self._alltoall(flat, "gradients", splits, blocking),
        ]

        def receive() -> tuple[torch.Tensor, torch.Tensor]:
            asked, (values, _) = results_of([work.result for work in works])
            used, _ = self._without_markers(*asked)
            return used, values.view(len(used), self._widths()[self._who.rank])

        return receive

    def row_mean(self, values: torch.Tensor) -> torch.Tensor:
        sums = values.sum(1, keepdim=True)
        name = f"{self._name}.row_mean"
        return allreduce.allreduce_(sums, name=name, op=allreduce.Sum, process_set=self._process_set).div_(self.placement.columns)


def exchange_for(placement: Placement, name: str, process_set: ProcessSet | None) -> RowExchange:
    kind = ColumnExchange if placement.sharding == COLUMN_WISE else RowExchange
    return kind(placement, name, process_set)
