"""A sharded table of ids that nobody knows beforehand: rows are given to ids that occur often enough, and taken from those out of use."""

from __future__ import annotations

import os
import warnings
from typing import Any

import numpy as np
import torch

from collective_core.extensions.sparse.embedding import TableModule, make
from collective_core.extensions.sparse.hashing import mixed
from collective_core.extensions.sparse.id_table import IdTable
from collective_core.extensions.sparse.row_optimizers import RowOptimizer
from collective_core.extensions.sparse.sharding import ROW_WISE, Placement, place
from collective_core.extensions.sparse.storage import DEFAULT_CACHE_BYTES, Storage
from collective_core.extensions.sparse.table import TAKEN_TOGETHER, ShardedTable, TableConfig, agree, checked
from collective_core.runtime.process_sets import ProcessSet, members_of
from collective_core.torch.compiling import not_compiled

#: The bits of a number below 1 that float64 can tell apart.
FRACTION_BITS = 53


class DynamicTable(ShardedTable):
    """Each rank looks after the ids whose mixed numbers are in its range, and has rows for its part of ``placement.rows`` of them."""

    def __init__(self, config: TableConfig, storage: Storage, admit_after: int, expire_after: int | None, scale: float, seed: int) -> None:
        self.admit_after, self.expire_after, self._scale, self._seed = admit_after, expire_after, scale, seed
        size = members_of(config.process_set).size
        least, span = -(1 << 63), 1 << 64
        bounds = tuple(least + span * rank // size for rank in range(size))
        # The last bound is never looked at: nothing is above it.
        super().__init__(config._replace(placement=config.placement._replace(row_bounds=(*bounds, (1 << 63) - 1))), storage)
        self.id_kind = "any"
        self._span = (bounds[self.rank], (*bounds, 1 << 63)[self.rank + 1] - 1)
        self._counts = True
        self._forget()

    def _forget(self) -> None:
        self.known = IdTable()
        self._free = np.arange(len(self.rows.weight))[::-1].copy()

    # --- lookups

    def lookup_counted(self, ids: torch.Tensor, counts: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """As :meth:`lookup`; with ``counts``, which is the same on all ranks, ids that occur here come nearer to a row."""
        self._counts = counts
        return self.lookup(ids)

    def _requests(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        positions, where, occurrences = torch.unique(mixed(ids), return_inverse=True, return_counts=True)
        return positions, where, occurrences if self._counts else None

    def _serve(self, asked: torch.Tensor) -> torch.Tensor:
        request = asked.cpu().numpy()
        positions = request if request.ndim == 1 else request[:, 0]
        if request.ndim == 2:
            distinct, where = np.unique(positions, return_inverse=True)
            counts = np.bincount(where.reshape(-1), request[:, 1], len(distinct))
            self._note(distinct, counts.astype(np.int64))
        rows = self._find(positions)
        values = self.rows.weight.new_zeros(len(rows), self.placement.columns)
        values[rows >= 0] = self.rows.values(rows[rows >= 0])
        return values

    def _find(self, positions: Any) -> torch.Tensor:
        """The row of each id, -1 for those without."""
        entries = self.known.find(positions)
        rows = np.full(len(entries), -1, np.int64)
        rows[entries >= 0] = self.known.rows[entries[entries >= 0]]
        return torch.from_numpy(rows).to(self.rows.weight.device)

    def _note(self, positions: Any, counts: Any) -> None:
        """These distinct ids have occurred so often; those that have done so often enough by now are given rows while there are any."""
        entries = self.known.find(positions)
        new = entries < 0
        entries[new] = self.known.add(positions[new], self.steps)
        self.known.counts[entries] += counts
        self.known.used[entries] = self.steps
        wanted = entries[(self.known.rows[entries] < 0) & (self.known.counts[entries] >= self.admit_after)]
        admitted = wanted[: len(self._free)]
        without = len(wanted) - len(admitted)
        if without:
            warnings.warn(
                f"{self.name}: all {len(self.rows.weight)} rows of rank {self.rank} are given away, and {without} ids have none: "
                "give the table a larger capacity, a larger admit_after, or an expire_after",
                stacklevel=2,
            )
        self.known.rows[admitted] = self._new_rows(len(admitted))
        self._begin_rows(self.known.ids[admitted], self.known.rows[admitted])

    def _new_rows(self, count: int) -> Any:
        left = len(self._free) - count
        rows, self._free = self._free[left:], self._free[:left]
        return rows

    def _begin_rows(self, ids: Any, rows: Any) -> None:
        """Initial values, which depend on the id and the seed alone."""
        columns = np.arange(self.placement.columns, dtype=np.int64) + self._seed * self.placement.columns
        numbers = mixed(ids[:, None] ^ mixed(columns)[None, :]) >> (64 - FRACTION_BITS)  # as many bits, and a sign
        values = torch.from_numpy(numbers * (self._scale / (1 << (FRACTION_BITS - 1)))).to(self.rows.weight)
        slots = {name: (tensor.shape[1], self.optimizer.slots[name].fill) for name, tensor in self.rows.state.items()}
        state = {name: values.new_full((len(rows), width), fill) for name, (width, fill) in slots.items()}
        self.rows.write(torch.from_numpy(rows), values, state)

    # --- steps

    def _rows_at(self, positions: torch.Tensor, gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self._find(positions.cpu().numpy())
        return rows[rows >= 0], gradients[rows >= 0]

    def update(self, positions: torch.Tensor, gradients: torch.Tensor, divisor: int, lr: float) -> None:
        super().update(positions, gradients, divisor, lr)
        if self.expire_after is not None and self.steps % self.expire_after == 0:
            is_kept = self.known.used >= self.steps - self.expire_after
            gone = self.known.rows[~is_kept]
            self._free = np.concatenate([self._free, gone[gone >= 0]])
            self.known.keep(is_kept)

    # --- contents

    def tensors(self) -> dict[str, torch.Tensor]:
        known = np.stack([self.known.ids, self.known.counts, self.known.used, self.known.rows], 1)
        return {**super().tensors(), "known": torch.from_numpy(known)}

    def load(self, tensors: dict[str, torch.Tensor], steps: int) -> str:
        known = tensors.get("known")
        if known is None or known.dim() != 2 or known.shape[1] != 4 or known.dtype != torch.int64:
            return f"{self.name}: known is missing; is the state that of a dynamic table?"
        given = known[known[:, 3] != -1, 3]
        if len(given) and (given.min() < 0 or given.max() >= len(self.rows.weight) or len(given.unique()) < len(given)):
            return f"{self.name}: known is damaged: each id has a row of its own, of 0 to {len(self.rows.weight) - 1}, or -1 for none"
        problem = super().load(tensors, steps)
        if not problem:
            known = known.clone()  # it may be what is forgotten now
            self._forget()
            self._add_known(known.cpu().numpy())
            self.known.rows[:] = known[:, 3].cpu().numpy()
            self._free = np.setdiff1d(self._free, self.known.rows)[::-1].copy()
        return problem

    def _add_known(self, known: Any) -> Any:
        entries = self.known.add(known[:, 0], 0)
        self.known.counts[entries], self.known.used[entries] = known[:, 1], known[:, 2]
        return entries

    def take(self, found: dict[str, np.ndarray[Any, Any]], was: Placement, writer: int) -> None:
        if writer == 0:
            self._forget()
        if "known" not in found or found["known"].ndim != 2 or found["known"].shape[1] != 4:
            raise ValueError("it holds no ids of a dynamic table")
        known = np.array(found["known"])
        known = known[(known[:, 0] >= self._span[0]) & (known[:, 0] <= self._span[1])]
        entries = self._add_known(known)
        old_rows = known[:, 3][known[:, 3] >= 0]
        if len(old_rows) > len(self._free):
            raise ValueError(f"rank {self.rank} has {len(self.rows.weight)} rows, too few for its ids: give the table a larger capacity")
        rows = self._new_rows(len(old_rows))
        self.known.rows[entries[known[:, 3] >= 0]] = rows
        count = len(was.rows_of(writer))
        if len(old_rows) and old_rows.max() >= count:
            raise ValueError("it holds ids of rows that it does not hold")
        self.rows.clear()
        for name, tensor in self.row_tensors().items():
            array = checked(found, name, count, tensor.shape[1])
            for begin in range(0, len(rows), TAKEN_TOGETHER):
                part = slice(begin, begin + TAKEN_TOGETHER)
                with torch.no_grad():
                    tensor[torch.from_numpy(rows[part])] = torch.from_numpy(np.array(array[old_rows[part]])).to(tensor)


class DynamicEmbedding(TableModule):
    """An embedding of any ids of int64, of which ``capacity`` at most have rows at a time. Collective as :class:`ShardedEmbedding`.

    An id is given a row in the lookup in which it has occurred ``admit_after`` times, in the batches of all ranks together. Before, and
    where all rows are given away, its values are 0 and its gradients are dropped. Evaluation (``eval()``) counts nothing. Ids that no step
    has used for ``expire_after`` steps are forgotten with their rows and counts, every ``expire_after`` steps.

    Args:
        capacity: rows of all ranks together. Each has rows for its share of the ids; leave some to spare.
        optimizer: of the rows, as for :class:`ShardedEmbedding`.
        scale: initial values are uniform between -scale and scale, and depend on id and ``seed`` alone.
        expire_after: None keeps all ids for ever.
        storage, cache_bytes: as of :class:`ShardedEmbedding`. Which ids have rows, and their counts, stay in memory.

    Raises ValueError for what is impossible.
    """

    def __init__(
        self,
        capacity: int,
        embedding_dim: int,
        optimizer: RowOptimizer,
        *,
        admit_after: int = 1,
        expire_after: int | None = None,
        scale: float = 0.01,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        process_set: ProcessSet | None = None,
        storage: str | os.PathLike[str] | None = None,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
    ) -> None:
        if admit_after < 1 or (expire_after is not None and expire_after < 1):
            raise ValueError(f"admit_after={admit_after} and expire_after={expire_after} must be at least 1")
        size = members_of(process_set).size
        if capacity < size:
            raise ValueError(f"capacity={capacity} is too small: each of the {size} ranks needs a row at least")
        config = TableConfig(place(ROW_WISE, capacity, embedding_dim, size), optimizer, dtype, process_set)
        config, _ = agree(config, f"admit_after={admit_after}, expire_after={expire_after}, scale={scale}", seed)
        where = Storage(storage, cache_bytes)
        table = make(lambda where: DynamicTable(config, where, admit_after, expire_after, scale, seed), config, where)
        super().__init__(table)
        self._table = table
        self.embedding_dim = embedding_dim

    @not_compiled
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of ``ids``, int64 or int32 of any shape: ``(*ids.shape, embedding_dim)``."""
        rows, where = self._table.lookup_counted(ids, self.training)
        return rows.index_select(0, where).view(*ids.shape, self.embedding_dim)

    def rows_in_use(self) -> int:
        """Of this rank."""
        return int((self._table.known.rows >= 0).sum())
