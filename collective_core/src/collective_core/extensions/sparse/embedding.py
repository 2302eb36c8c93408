"""``torch.nn.Embedding`` and ``EmbeddingBag`` whose rows live on one rank each."""

from __future__ import annotations

import contextlib
import os
from typing import Any, Callable, Iterator, TypeVar

import torch
import torch.nn.functional as F

from collective_core.errors import CollectiveError
from collective_core.extensions.sparse.row_optimizers import RowOptimizer
from collective_core.extensions.sparse.sharding import ROW_WISE, place
from collective_core.extensions.sparse.storage import DEFAULT_CACHE_BYTES, Storage
from collective_core.extensions.sparse.table import Initialise, ShardedTable, TableConfig, agree
from collective_core.runtime import membership
from collective_core.runtime.process_sets import ProcessSet, members_of
from collective_core.torch.compiling import not_compiled
from collective_core.torch.functions import allgather_object

T = TypeVar("T", bound=ShardedTable)


class TableModule(torch.nn.Module):
    """A module with a table. ``weight`` is this rank's shard: ``DistributedOptimizer`` leaves it out of its sums and updates its rows."""

    def __init__(self, table: ShardedTable) -> None:
        super().__init__()
        self.table = table
        self._parameters["weight"] = table.weight

    @contextlib.contextmanager
    def _without_weight(self) -> Iterator[None]:
        self._parameters["weight"] = None
        try:
            yield
        finally:
            self._parameters["weight"] = self.table.weight

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **options: Any) -> Any:
        """What ``to()`` and its kind call: rows stay in the host's memory, whatever device the rest of a model goes to."""
        dtype = self.table.rows.weight.dtype
        wanted = fn(torch.empty(0, dtype=dtype)).dtype
        if wanted != dtype:
            raise ValueError(
                f"{self.table.name} has numbers of {dtype} and cannot be converted to {wanted}: choose the dtype when the "
                "table is made (float32 or float64), and convert the model's other modules one by one"
            )
        with self._without_weight():
            return super()._apply(fn, *args, **options)

    def extra_repr(self) -> str:
        table = self.table
        return f"{table.placement.rows}, {table.placement.columns}, {table.placement.sharding}, {table.optimizer.describe()}"

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        with self._without_weight():
            super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, tensor in {**self.table.tensors(), "steps": torch.tensor(self.table.steps)}.items():
            destination[prefix + name] = part = tensor.detach()
            part.collective_shard = True

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        mine = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
        problem = self.table.load(mine, int(mine.get("steps", 0)))
        if problem:
            rest[-1].append(problem)  # PyTorch's list of errors, which it raises


class _Sharded(TableModule):
    """Base of both embeddings: a table of ``num_embeddings`` rows."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        optimizer: RowOptimizer,
        sharding: str = ROW_WISE,
        owner: int = 0,
        init: Initialise = torch.nn.init.normal_,
        seed: int | None = None,
        dtype: torch.dtype = torch.float32,
        name: str | None = None,
        process_set: ProcessSet | None = None,
        hash_ids: bool = False,
        storage: str | os.PathLike[str] | None = None,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        padding_idx: int | None = None,
    ) -> None:
        if padding_idx is not None and (hash_ids or not 0 <= padding_idx < num_embeddings):
            raise ValueError(f"padding_idx={padding_idx} is not possible: it is a row, 0 to {num_embeddings - 1}, and not of hashed ids")
        placement = place(sharding, num_embeddings, embedding_dim, members_of(process_set).size, owner)
        config = TableConfig(placement, optimizer, dtype, process_set, name)
        config, agreed_seed = agree(config, f"hash_ids={hash_ids}, padding_idx={padding_idx}", seed)
        super().__init__(make(lambda where: ShardedTable(config, where, hash_ids), config, Storage(storage, cache_bytes)))
        self.table.initialise(init, agreed_seed)
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx
        if padding_idx is not None and padding_idx in (rows := placement.rows_of(self.table.rank)):
            self.table.weight.detach()[rows.index(padding_idx)] = 0.0

    def _padding(self, ids: torch.Tensor, where: torch.Tensor) -> int | None:
        """The number of the padding row among the distinct rows of these ids, if it is one of them."""
        found = where[:0] if self.padding_idx is None else where[ids.reshape(-1) == self.padding_idx]
        return int(found[0]) if len(found) else None

    def gather_weight(self) -> torch.Tensor:
        """The whole table, on every rank. Collective; for tables that fit in memory."""
        return self.table.gather_whole()

    def load_weight(self, weight: torch.Tensor) -> None:
        """Takes this rank's part of a whole table, ``num_embeddings`` x ``embedding_dim``. The optimizer's state stays."""
        self.table.load_whole(weight)


def make(make_table: Callable[[Storage], T], config: TableConfig, storage: Storage) -> T:
    """The table. Raises :class:`CollectiveError` on every rank where any has no room for it, or was given a ``storage`` that cannot be."""
    error, table = "", None
    try:
        table = make_table(storage)
    except (TypeError, ValueError) as failure:
        error = f"{config.name}: rank {membership.rank()}: {failure}"
    except (OSError, RuntimeError, MemoryError) as failure:  # PyTorch's error for memory is a RuntimeError
        where = "" if storage.folder is None else f" in {storage.folder}"
        error = f"{config.name}: rank {membership.rank()} has no room for its rows{where}: {failure}"
    errors = [text for text in allgather_object(error, f"{config.name}.room", config.process_set) if text]
    if errors or table is None:
        raise CollectiveError(errors[0], "invalid")
    return table


class ShardedEmbedding(_Sharded):
    """``torch.nn.Embedding`` over a table that is divided over the ranks. Making it, ``forward`` and the step are collective.

    Each rank looks up the ids of its own batch, which may be empty or of another size than others'. Every distinct row travels once.
    Rows are in the host's memory and stay there when the model is moved; what ``forward`` returns is on the device of the ids.
    Gradients are averaged over ranks and applied by ``step()`` of the ``hvd.DistributedOptimizer`` that has the module's parameters.

    Args:
        optimizer: of the rows, one of ``hvd.nn.SGD``, ``Adagrad``, ``RowWiseAdagrad``, ``Adam``, ``FTRL``.
        sharding: ``row_wise``, ``table_wise`` (all on rank ``owner``) or ``column_wise``.
        owner: with a process set, the number in it.
        init: fills a block of whole rows in place, from PyTorch's generator.
        seed: of the initial values, which do not depend on the number of ranks; None has the first rank draw one.
        dtype: float32 or float64.
        name: in errors; by default a number.
        hash_ids: ids are any of int64, hashed into ``num_embeddings`` buckets. Those that share a bucket share a row.
        storage: a folder on a local disk, for tables that exceed memory: rows and their optimizer's state lie in a file there, which has no
            name and ends with the process. All of its room is taken at once.
        cache_bytes: with ``storage``, of memory for rows in use, on each rank.
        padding_idx: a row of zeros that learns nothing, as PyTorch's; ``ShardedEmbeddingBag`` leaves it out of sums and means.

    Raises :class:`CollectiveError` (kind ``mismatch``) where ranks give different arguments, and on every rank (kind ``invalid``) where
    an id on any is out of range.
    """

    @not_compiled
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of ``ids``, int64 or int32 of any shape: ``(*ids.shape, embedding_dim)``."""
        rows, where = self.table.lookup(ids)
        padding = self._padding(ids, where)
        if padding is not None:
            return F.embedding(where.view(ids.shape), rows, padding)
        return rows.index_select(0, where).view(*ids.shape, self.embedding_dim)  # whose gradient takes less time


class ShardedEmbeddingBag(_Sharded):
    """``torch.nn.EmbeddingBag`` over a table that is divided over the ranks, as :class:`ShardedEmbedding`.

    Args:
        mode: ``sum`` or ``mean`` (0 for an empty bag).
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, optimizer: RowOptimizer, mode: str = "mean", **options: Any) -> None:
        if mode not in ("sum", "mean"):
            raise ValueError(f"mode={mode!r} is not possible; choose sum or mean")
        super().__init__(num_embeddings, embedding_dim, optimizer, **options)
        self.mode = mode

    @not_compiled
    def forward(
        self, ids: torch.Tensor, offsets: torch.Tensor | None = None, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``ids``: a row per bag, or of one dimension with the ``offsets`` at which bags begin. ``(bags, embedding_dim)``.

        ``per_sample_weights``, with mode ``sum``: of the shape of ``ids``.
        """
        rows, where = self.table.lookup(ids)
        bags = where.view(ids.shape)
        padding = self._padding(ids, where)
        return F.embedding_bag(bags, rows, offsets, mode=self.mode, per_sample_weights=per_sample_weights, padding_idx=padding)
