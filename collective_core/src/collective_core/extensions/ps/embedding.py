"""Embeddings whose rows live on parameter servers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from collective_core.errors import InvalidUseError
from collective_core.extensions.ps.arrays import Table
from collective_core.extensions.ps.store import describe_rows
from collective_core.extensions.sparse.row_optimizers import RowOptimizer
from collective_core.extensions.sparse.table import MAX_PASSES, merged
from collective_core.torch.compiling import not_compiled


class _Embedding(torch.nn.Module):
    """Base of both embeddings. It has no parameters: ``hvd.ps.DistributedOptimizer``, which is given the model, finds it there."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        optimizer: RowOptimizer,
        *,
        scale: float = 0.01,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        name: str | None = None,
    ) -> None:
        super().__init__()
        describe_rows(optimizer)  # raises for one that servers have not
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self._how = {"optimizer": optimizer, "scale": scale, "seed": seed, "dtype": dtype}
        #: Of the table; None: the optimizer chooses it.
        self.name = name
        self._table: Table | None = None
        #: Rows and their gradients: one of each backward pass of a lookup.
        self._waiting: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def is_connected(self) -> bool:
        """Whether an optimizer of this job's ranks, as they are now, trains it."""
        return self._table is not None and self._table.is_current

    def connect(self, default_name: str, staleness: int | None) -> None:
        """Makes the table; called by the optimizer."""
        self._waiting.clear()
        self.name = self.name or default_name
        self._table = Table(self.name, self.num_embeddings, self.embedding_dim, staleness=staleness, **self._how)

    @property
    def table(self) -> Table:
        if self._table is None:
            what = self.name or f"hvd.ps.{type(self).__name__}"
            raise InvalidUseError(f"{what}: make hvd.ps.DistributedOptimizer(optimizer, model) before the first lookup", "invalid")
        return self._table

    def _lookup(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The distinct rows, and for each id its number among them."""
        used, where = torch.unique(ids.detach().reshape(-1), return_inverse=True)
        rows = self.table.pull(used).to(ids.device)
        if torch.is_grad_enabled():
            rows.requires_grad_().register_hook(partial(self._keep_gradient, used))
        return rows, where.view(ids.shape)

    def _keep_gradient(self, used: torch.Tensor, gradient: torch.Tensor) -> None:
        if len(self._waiting) == MAX_PASSES:
            text = f"{self.name}: the gradients of {MAX_PASSES} lookups wait for a step of hvd.ps.DistributedOptimizer"
            raise InvalidUseError(text, "invalid")
        self._waiting.append((used, gradient.detach().clone()))  # a second pass over a graph may add to what it was given

    def take_gradients(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows and the sums of their gradients since the last call."""
        found, self._waiting = self._waiting, []
        if len(found) == 1:
            return found[0]
        none = (torch.empty(0, dtype=torch.int64), torch.empty(0, self.embedding_dim, dtype=self._how["dtype"]))
        used, gradients = (torch.cat([part.cpu() for part in parts]) for parts in zip(none, *found))
        return merged(used, gradients)

    def drop_gradients(self) -> None:
        self._waiting.clear()

    def gather_weight(self) -> torch.Tensor:
        """The whole table, in host memory; for tables that fit. Waits as ``staleness`` says."""
        return self.table.pull(torch.arange(self.num_embeddings))

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, name={self.name}"


class Embedding(_Embedding):
    """``torch.nn.Embedding`` over a table on the parameter servers. Lookups pull the distinct rows of a batch and nothing else.

    Gradients are pushed by ``step()`` of the ``hvd.ps.DistributedOptimizer`` that was given the model. A deep copy of it reads the same
    rows.

    Args:
        optimizer: of the rows, one of ``hvd.nn.SGD``, ``Adagrad``, ``RowWiseAdagrad``, ``Adam``, ``FTRL``; without ``lr`` it takes that of
            the first parameter group.
        name: of the table; by default it is made of the optimizer's and the module's place in the model.
        scale, seed: initial values are uniform between -scale and scale, and depend on row and seed alone.
        dtype: float32 or float64.
    """

    @not_compiled
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of ``ids``, int64 or int32 of any shape: ``(*ids.shape, embedding_dim)``, on the device of the ids."""
        rows, where = self._lookup(ids)
        return F.embedding(where, rows)


class EmbeddingBag(_Embedding):
    """``torch.nn.EmbeddingBag`` over a table on the parameter servers, as :class:`Embedding`.

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
        rows, where = self._lookup(ids)
        return F.embedding_bag(where, rows, offsets, mode=self.mode, per_sample_weights=per_sample_weights)
