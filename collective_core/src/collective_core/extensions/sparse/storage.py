"""Storage of a rank's rows of a table, with what their optimizer keeps for them: in memory, or in a file with those in use in memory."""

from __future__ import annotations

import os
import sys
from typing import Any, Iterator, Mapping, NamedTuple

import torch

from collective_core.extensions.sparse.row_file import RowFile
from collective_core.extensions.sparse.row_optimizers import Slot

DEFAULT_CACHE_BYTES = 256 << 20


class Storage(NamedTuple):
    """Wish of a program: nothing, or a ``folder`` on a local disk and the bytes of memory for rows in use on each rank."""

    folder: str | os.PathLike[str] | None = None
    cache_bytes: int = DEFAULT_CACHE_BYTES

    def rows(self, shape: tuple[int, int], slots: Mapping[str, Slot], dtype: torch.dtype) -> Rows:
        """Raises OSError or RuntimeError where there is no room for them, and ValueError or TypeError for what is no folder or number."""
        if not isinstance(self.cache_bytes, int) or self.cache_bytes < 0:
            raise ValueError(f"cache_bytes={self.cache_bytes!r} is not possible: write the bytes of memory for rows in use, a whole number")
        if self.folder is None or not shape[0]:
            return Rows(shape, slots, dtype)
        return StoredRows(shape, slots, dtype, self.folder, self.cache_bytes)


class ShardParameter(torch.nn.Parameter):
    """A parameter of which every rank holds other rows or columns. ``collective_shard``: its table (torch/sharded.py)."""

    collective_shard: Any = None

    @property
    def grad(self) -> torch.Tensor | None:
        """None, as its rows are not all here. ``zero_grad()`` of a module asks for it, and PyTorch tells in no other way that it is called:
        what waits for the table is dropped then."""
        caller = sys._getframe(1)
        if caller.f_code.co_name == "zero_grad" and isinstance(caller.f_locals.get("self"), torch.nn.Module):
            self.collective_shard.drop_gradients()
        return super().grad

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        torch.Tensor.grad.__set__(self, gradient)

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError(
            "a sharded table cannot be copied: a copy would belong to no optimizer. Make another one with the same arguments"
        )


class Rows:
    """In memory. ``weight`` and, by name, ``state``: tensors with all rows, to be read after :meth:`flush` and written to after
    :meth:`clear`. Others read and write rows by their numbers, which are distinct in what is written.
    """

    weight: torch.Tensor
    state: dict[str, torch.Tensor]

    def __init__(self, shape: tuple[int, int], slots: Mapping[str, Slot], dtype: torch.dtype) -> None:
        widths = {name: shape[1] if slot.is_wide else 1 for name, slot in slots.items()}
        self._make(shape[0], {"": shape[1], **widths}, dtype)
        for name, slot in slots.items():
            if slot.fill:  # zeros take no memory before they are written to
                self.state[name].fill_(slot.fill)

    def _make(self, rows: int, widths: dict[str, int], dtype: torch.dtype) -> None:
        self.state = {name: torch.zeros(rows, width, dtype=dtype) for name, width in widths.items()}
        self.weight = self.state.pop("")

    def parameter(self) -> ShardParameter:
        """``weight`` as programs have it, who may keep it, read it and write to it at any time."""
        return ShardParameter(self.weight)

    def values(self, rows: torch.Tensor) -> torch.Tensor:
        """Of the weight."""
        return self.weight.index_select(0, rows)

    def read(self, rows: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Copies of the weight's and the state's rows."""
        return self.values(rows), {name: tensor.index_select(0, rows) for name, tensor in self.state.items()}

    def write(self, rows: torch.Tensor, values: torch.Tensor, state: Mapping[str, torch.Tensor]) -> None:
        self.weight.index_copy_(0, rows, values)
        for name, tensor in state.items():
            self.state[name].index_copy_(0, rows, tensor)

    def flush(self) -> None:
        """Whoever reads the whole tensors needs it."""

    def clear(self) -> None:
        """Whoever writes to the whole tensors needs it before."""


class StoredRows(Rows):
    """In a file, where a row's values and state lie side by side."""

    def __init__(
        self, shape: tuple[int, int], slots: Mapping[str, Slot], dtype: torch.dtype, folder: str | os.PathLike[str], cache_bytes: int
    ) -> None:
        self._folder, self._cache_bytes = folder, cache_bytes
        super().__init__(shape, slots, dtype)

    def _make(self, rows: int, widths: dict[str, int], dtype: torch.dtype) -> None:
        self._widths = widths
        numbers = torch.empty(0, dtype=dtype).numpy().dtype
        self._file = RowFile(self._folder, (rows, sum(widths.values())), numbers, self._cache_bytes)
        self.state = self._divided(torch.from_numpy(self._file.whole))
        self.weight = self.state.pop("")

    def _divided(self, records: torch.Tensor) -> dict[str, torch.Tensor]:
        return dict(zip(self._widths, records.split(list(self._widths.values()), dim=1)))

    def parameter(self) -> ShardParameter:
        parameter = StoredParameter(self.weight)
        parameter.rows = self
        return parameter

    def values(self, rows: torch.Tensor) -> torch.Tensor:
        distinct, where = torch.unique(rows, return_inverse=True)
        return torch.from_numpy(self._file.read(distinct.numpy()))[:, : self.weight.shape[1]].index_select(0, where)

    def read(self, rows: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        parts = self._divided(torch.from_numpy(self._file.read(rows.numpy())))
        # As in memory, so that PyTorch computes with them in the same way, to the last bit.
        state = {name: part.contiguous() for name, part in parts.items()}
        return state.pop(""), state

    def write(self, rows: torch.Tensor, values: torch.Tensor, state: Mapping[str, torch.Tensor]) -> None:
        self._file.write(rows.numpy(), torch.cat([values, *state.values()], 1).numpy())

    def flush(self) -> None:
        self._file.flush()

    def clear(self) -> None:
        self._file.clear()

    def __reduce__(self) -> Any:
        raise TypeError("a table in a file cannot be pickled, nor its parameter: save its state_dict(), or use hvd.Checkpoints")


#: What looks at no number of a tensor.
_METADATA = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in ("device", "dtype", "is_leaf", "layout", "ndim", "requires_grad", "shape")]
    + [torch.Tensor.grad.__get__, torch.Tensor.grad.__set__, torch.Tensor.requires_grad.__set__]
    + [torch.Tensor.dim, torch.Tensor.element_size, torch.Tensor.numel, torch.Tensor.size, torch.Tensor.__len__]
)


class StoredParameter(ShardParameter):
    """The weight of rows in a file: every use of its numbers first brings changed rows there and empties the cache."""

    rows: StoredRows

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _METADATA:
            for parameter in _stored(args, kwargs or {}):
                parameter.rows.clear()
        return super().__torch_function__(func, types, args, kwargs or {})


def _stored(*values: Any) -> Iterator[StoredParameter]:
    for value in values:
        if isinstance(value, StoredParameter):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _stored(*value)
        elif isinstance(value, dict):
            yield from _stored(*value.values())
