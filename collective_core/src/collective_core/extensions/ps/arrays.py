"""A worker's side of arrays on servers: pushes of gradients, pulls of values."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from collective_core.extensions.ps import layout
from collective_core.extensions.ps.client import Pull, Push, client
from collective_core.extensions.ps.clocks import check_staleness
from collective_core.extensions.ps.messages import Array as Numbers
from collective_core.extensions.ps.store import ELEMENTWISE, describe_rows, name_of, options_of, plain
from collective_core.extensions.sparse.row_optimizers import RowOptimizer


class Array:
    """A tensor on the servers, cut into a part for each (layout.py), with its optimizer. All workers make it, by the same name.

    Args:
        value: its initial value: that of rank 0 counts.
        optimizer: a class of torch.optim that treats every element alone (SGD, Adam, …); ``options`` are its constructor's.
        staleness: 0: an update is the mean of one gradient of each worker, and a worker that has pushed reads what includes it. k: every
            push is an update, and a worker may be k pushes ahead of the slowest. None: as far as it likes.
        parameters: what its elements are; compared, as its shape is.

    Raises ValueError for what is impossible and :class:`CollectiveError` (kind ``mismatch``) where workers make different ones.
    """

    def __init__(
        self, name: str, value: torch.Tensor, optimizer: type, *, staleness: int | None = 0, parameters: str = "", **options: Any
    ) -> None:
        check_staleness(staleness)
        kind = getattr(optimizer, "__name__", "")
        if kind not in ELEMENTWISE or getattr(torch.optim, kind) is not optimizer:
            raise ValueError(f"parameter servers have these optimizers of torch.optim: {', '.join(ELEMENTWISE)}; not {optimizer!r}")
        if not value.numel():
            raise ValueError(f"{name} is empty")
        probe = optimizer([torch.nn.Parameter(torch.zeros(1))], **options)  # which knows what it can be given
        self.name, self.shape, self.dtype = name, value.shape, value.dtype
        self.options = options_of(optimizer, probe.param_groups[0])
        self._kind = optimizer
        described = {
            "kind": "dense",
            "shape": [*value.shape],
            "parameters": parameters,
            "dtype": name_of(value.dtype, name),
            "optimizer": kind,
            "options": self.options,
            "staleness": staleness,
        }
        self._client = client()
        bounds = layout.bounds_of(name, value.numel(), self._client.group.servers)
        self._ranges = {server: slice(*ends) for server, ends in enumerate(zip(bounds, bounds[1:])) if ends[0] < ends[1]}
        is_first = self._client.group.rank == 0
        parts = self._cut(value) if is_first else {server: [] for server in self._ranges}
        self._client.create(name, _plain(described), parts, has_initial=True)

    def _cut(self, tensor: torch.Tensor) -> dict[int, list[Numbers]]:
        flat = tensor.detach().to("cpu", self.dtype).contiguous().reshape(-1).numpy()
        return {server: [flat[part]] for server, part in self._ranges.items()}

    def push(self, gradient: torch.Tensor) -> None:
        """Sends a gradient of the array's shape, from any device. Does not wait."""
        self._client.exchange([self.to_push(gradient, self.options)], [])

    def pull(self) -> torch.Tensor:
        """The value, in host memory. Waits as ``staleness`` says."""
        pull = self.to_pull()
        return self.pulled(self._client.exchange([], [pull])[0])

    def to_push(self, gradient: torch.Tensor, options: dict[str, Any]) -> Push:
        if gradient.layout is not torch.strided:
            raise ValueError(f"{self.name}: gradients are dense; for sparse ones there is hvd.ps.Table")
        if gradient.shape != self.shape:
            raise ValueError(f"{self.name} has the shape {tuple(self.shape)}, and the gradient {tuple(gradient.shape)}")
        return Push(self.name, options, self._cut(gradient))

    def to_pull(self) -> Pull:
        return Pull(self.name, {server: [] for server in self._ranges})

    def pulled(self, parts: dict[int, Numbers]) -> torch.Tensor:
        """The tensor of an answer."""
        return torch.from_numpy(np.concatenate([parts[server] for server in sorted(parts)])).view(self.shape)


class Table:
    """Rows of numbers on the servers, row i on server i mod n, with an optimizer of hvd.nn. All workers make it, by the same name.

    Args:
        optimizer: ``hvd.nn.SGD``, ``Adagrad``, ``RowWiseAdagrad``, ``Adam`` or ``FTRL``, with ``lr``.
        scale, seed: initial values are uniform between -scale and scale, and depend on row and seed alone.
        staleness: as of :class:`Array`.

    Raises as :class:`Array`.
    """

    def __init__(
        self,
        name: str,
        rows: int,
        columns: int,
        optimizer: RowOptimizer,
        *,
        scale: float = 0.01,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        staleness: int | None = 0,
    ) -> None:
        check_staleness(staleness)
        if rows < 1 or columns < 1:
            raise ValueError(f"{name} needs at least one row and one column, not {rows} x {columns}")
        self.name, self.rows, self.columns, self.dtype = name, rows, columns, dtype
        self._has_rate = optimizer.lr is not None
        described = {
            "kind": "table",
            "rows": rows,
            "columns": columns,
            "dtype": name_of(dtype, name),
            **describe_rows(optimizer),
            "scale": scale,
            "seed": seed,
            "staleness": staleness,
        }
        self._client = client()
        self._servers = self._client.group.servers
        self._client.create(name, _plain(described), {server: [] for server in range(self._servers)}, has_initial=False)

    @property
    def is_current(self) -> bool:
        """Whether it is on the servers of this job's ranks as they are now."""
        return self._client is client()

    def __deepcopy__(self, memo: dict[int, Any]) -> Table:
        return self  # its rows are on the servers, and not in what is copied

    def push(self, ids: torch.Tensor, gradients: torch.Tensor, lr: float | None = None) -> None:
        """Sends gradients of rows: ``ids`` of one dimension, where one may occur several times, and ``(len(ids), columns)``.

        ``lr``: for an optimizer without its own. A worker that has none pushes no ids. Does not wait.
        """
        self._client.exchange([self.to_push(ids, gradients, {"lr": lr})], [])

    def pull(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of ``ids``, of one dimension: ``(len(ids), columns)``, in host memory. Waits as ``staleness`` says."""
        pull, order = self.to_pull(ids)
        return self.pulled(self._client.exchange([], [pull])[0], order)

    def to_push(self, ids: torch.Tensor, gradients: torch.Tensor, options: dict[str, Any]) -> Push:
        if not self._has_rate and options.get("lr") is None:
            raise ValueError(f"{self.name}: give its optimizer a learning rate, or one to push()")
        rows, numbers = self._checked(ids), gradients.detach().to("cpu", self.dtype).contiguous().numpy()
        if numbers.shape != (len(rows), self.columns):
            raise ValueError(f"{self.name}: the gradients of {len(rows)} rows are {len(rows)} x {self.columns}, not {numbers.shape}")
        parts = {}
        for server in range(self._servers):  # also those of which no row is used: they count pushes
            mine = layout.server_of(rows, self._servers) == server
            parts[server] = [layout.row_at_server(rows[mine], self._servers), numbers[mine]]
        return Push(self.name, {name: plain(value) for name, value in options.items()}, parts)

    def to_pull(self, ids: torch.Tensor) -> tuple[Pull, Numbers]:
        """And in which order its rows come."""
        rows = self._checked(ids)
        owners = layout.server_of(rows, self._servers)
        order = np.argsort(owners, kind="stable")
        used = [server for server in range(self._servers) if (owners == server).any()]
        return Pull(self.name, {server: [layout.row_at_server(rows[owners == server], self._servers)] for server in used}), order

    def pulled(self, parts: dict[int, Numbers], order: Numbers) -> torch.Tensor:
        """The rows of an answer."""
        rows = torch.empty(len(order), self.columns, dtype=self.dtype)
        if parts:
            rows[torch.from_numpy(order)] = torch.from_numpy(np.concatenate([parts[server] for server in sorted(parts)]))
        return rows

    def _checked(self, ids: torch.Tensor) -> Numbers:
        if ids.dtype not in (torch.int64, torch.int32) or ids.dim() != 1:
            raise ValueError(f"{self.name}: ids must be of int64 or int32 and of one dimension, not {ids.dtype} of {tuple(ids.shape)}")
        rows: Numbers = ids.detach().to("cpu", torch.int64).numpy()
        if len(rows) and not 0 <= rows.min() <= rows.max() < self.rows:
            wrong = rows.min() if rows.min() < 0 else rows.max()
            raise ValueError(f"{self.name}: id {wrong} is out of range: the table has rows 0 to {self.rows - 1}")
        return rows


def _plain(described: dict[str, Any]) -> dict[str, Any]:
    """As it is after its way through JSON: tuples are lists."""
    return {
        key: [*value] if isinstance(value, tuple) else _plain(value) if isinstance(value, dict) else value
        for key, value in described.items()
    }
