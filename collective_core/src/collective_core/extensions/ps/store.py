"""The arrays that a server holds: parts of dense ones with an optimizer of torch.optim, and rows of tables with one of hvd.nn's."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any, Mapping, Sequence

import numpy as np
import torch

from collective_core.extensions.ps import layout, messages
from collective_core.extensions.ps.messages import Array
from collective_core.extensions.ps.server import Contribution
from collective_core.extensions.sparse import row_optimizers, shards
from collective_core.extensions.sparse.row_optimizers import RowOptimizer, Update
from collective_core.extensions.sparse.table import INITIALISED_TOGETHER, merged

#: Those that treat every element alone: what they do to a part of an array is what they would do to the whole.
ELEMENTWISE = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
OF_ROWS = ("SGD", "Adagrad", "RowWiseAdagrad", "Adam", "FTRL")
#: Options that say how a step is computed, and not what.
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def name_of(dtype: torch.dtype, what: str) -> str:
    """Raises ValueError for numbers that servers do not hold."""
    for name, known in DTYPES.items():
        if known == dtype:
            return name
    raise ValueError(f"{what} has numbers of {dtype}, and parameter servers hold float32 and float64")


def options_of(kind: type, group: Mapping[str, Any]) -> dict[str, Any]:
    """Of a parameter group what the optimizer's constructor takes, as plain values."""
    taken = [name for name in inspect.signature(kind).parameters if name in group and name not in _IMPLEMENTATION]
    return {name: plain(group[name]) for name in taken if name != "params"}


def plain(option: Any) -> Any:
    """A learning rate, for example, as a number of Python, where a scheduler has made it one of NumPy or a tensor."""
    return option.item() if isinstance(option, (torch.Tensor, np.generic)) else option


def describe_rows(optimizer: RowOptimizer) -> dict[str, Any]:
    """As :func:`_rows_from` takes it. Raises TypeError for one that is not hvd.nn's."""
    if type(optimizer).__name__ not in OF_ROWS or type(optimizer).__module__ != row_optimizers.__name__:
        raise TypeError(f"optimizer is one of hvd.nn's ({', '.join(OF_ROWS)}), not a {type(optimizer).__name__}")
    return {"optimizer": type(optimizer).__name__, "options": {k: plain(v) for k, v in vars(optimizer).items() if k != "slots"}}


def _rows_from(described: dict[str, Any]) -> RowOptimizer:
    optimizer: RowOptimizer = getattr(row_optimizers, OF_ROWS[OF_ROWS.index(described["optimizer"])])(**described["options"])
    return optimizer


class Dense:
    """Some elements of an array, in one dimension."""

    def __init__(self, described: dict[str, Any], values: torch.Tensor) -> None:
        self.described = described
        self._values = torch.nn.Parameter(values)
        kind = getattr(torch.optim, ELEMENTWISE[ELEMENTWISE.index(described["optimizer"])])
        self._optimizer = kind([self._values], **described["options"])

    def change_options(self, described: dict[str, Any]) -> None:
        self.described = described
        self._optimizer.param_groups[0].update(described["options"])

    def update(self, contributions: Sequence[Contribution]) -> None:
        gradient = torch.from_numpy(contributions[0].arrays[0])
        for contribution in contributions[1:]:
            gradient = gradient + torch.from_numpy(contribution.arrays[0])
        self._values.grad = gradient if len(contributions) == 1 else gradient / len(contributions)
        self._optimizer.param_groups[0].update(contributions[0].options)
        self._optimizer.step()

    def read(self) -> Array:
        return self._values.detach().numpy()

    def tensors(self) -> dict[str, torch.Tensor]:
        state = {name: value for name, value in self._optimizer.state[self._values].items() if isinstance(value, torch.Tensor)}
        return {"values": self._values.detach(), **state}

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        self._optimizer.state[self._values].update({name: tensor for name, tensor in tensors.items() if name != "values"})


class Table:
    """The rows of a table that this server holds."""

    def __init__(self, described: dict[str, Any], values: torch.Tensor) -> None:
        self.described = described
        self._values = values
        self._optimizer = _rows_from(described)
        self._steps = 0
        self._state = {
            name: torch.full((len(values), values.shape[1] if slot.is_wide else 1), slot.fill, dtype=values.dtype)
            for name, slot in self._optimizer.slots.items()
        }

    def change_options(self, described: dict[str, Any]) -> None:
        self.described, self._optimizer = described, _rows_from(described)

    def update(self, contributions: Sequence[Contribution]) -> None:
        self._steps += 1
        ids, gradients = zip(*(contribution.arrays for contribution in contributions))
        used, sums = merged(torch.from_numpy(np.concatenate(ids)), torch.from_numpy(np.concatenate(gradients)))
        if len(contributions) > 1:
            sums = sums / len(contributions)
        values = self._values.index_select(0, used)
        state = {name: tensor.index_select(0, used) for name, tensor in self._state.items()}
        lr = contributions[0].options["lr"] if self._optimizer.lr is None else self._optimizer.lr
        self._optimizer.update(Update(values, sums, state, lr, self._steps, lambda numbers: numbers.mean(1, keepdim=True)))
        self._values.index_copy_(0, used, values)
        for name, tensor in state.items():
            self._state[name].index_copy_(0, used, tensor)

    def read(self, ids: Array) -> Array:
        return self._values.index_select(0, torch.from_numpy(ids)).numpy()

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"values": self._values, "steps": torch.tensor(self._steps), **self._state}

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        self._steps = int(tensors["steps"])
        self._state.update({name: tensors[name] for name in self._state})


def _initial_rows(described: dict[str, Any], index: int, servers: int) -> torch.Tensor:
    """Uniform between -scale and scale: the same for a row, however many servers there are."""
    mine = layout.rows_of(index, described["rows"], servers)
    values = torch.empty(len(mine), described["columns"], dtype=DTYPES[described["dtype"]])
    generator, done = torch.Generator(), 0
    for begin in range(0, described["rows"], INITIALISED_TOGETHER):
        end = min(begin + INITIALISED_TOGETHER, described["rows"])
        block = torch.empty(end - begin, described["columns"], dtype=values.dtype)
        block.uniform_(-described["scale"], described["scale"], generator=generator.manual_seed(described["seed"] * 1_000_003 + begin))
        part = block[(index - begin) % servers :: servers]
        values[done : done + len(part)] = part
        done += len(part)
    return values


class Store:
    """All arrays of the server ``index`` of so many."""

    def __init__(self, index: int, servers: int) -> None:
        self.index, self.servers = index, servers
        self.updates = 0
        self._arrays: dict[str, Dense | Table] = {}

    def has(self, name: str) -> bool:
        return name in self._arrays

    def described(self, name: str) -> dict[str, Any]:
        return self._arrays[name].described

    def create(self, name: str, described: dict[str, Any], initial: list[Array]) -> None:
        if name in self._arrays:
            self._arrays[name].change_options(described)
        elif described["kind"] == "dense":
            self._arrays[name] = Dense(described, torch.from_numpy(initial[0].copy()))
        else:
            self._arrays[name] = Table(described, _initial_rows(described, self.index, self.servers))

    def update(self, name: str, contributions: list[Contribution]) -> None:
        with torch.no_grad():
            self._arrays[name].update(contributions)
        self.updates += 1

    def read(self, name: str, arrays: list[Array]) -> Array:
        return self._arrays[name].read(*arrays)

    # --- as a whole

    def _header(self) -> dict[str, Any]:
        arrays = [[name, array.described, list(array.tensors())] for name, array in self._arrays.items()]
        return {"index": self.index, "servers": self.servers, "updates": self.updates, "contents": arrays}

    def pack(self) -> Array:
        tensors = [tensor for array in self._arrays.values() for tensor in array.tensors().values()]
        return messages.pack(self._header(), [tensor.numpy() for tensor in tensors])

    @classmethod
    def unpack(cls, message: Array) -> Store:
        """What :meth:`pack` has given."""
        header, arrays = messages.unpack(message)
        return cls._from(header, arrays)

    @classmethod
    def _from(cls, header: dict[str, Any], arrays: Sequence[Array]) -> Store:
        store = cls(header["index"], header["servers"])
        store.updates = header["updates"]
        rest = iter(arrays)
        for name, described, names in header["contents"]:
            tensors = {each: torch.from_numpy(np.array(next(rest))) for each in names}
            array = (Dense if described["kind"] == "dense" else Table)(described, tensors["values"])
            array.load(tensors)
            store._arrays[name] = array
        return store

    def write(self, folder: Path) -> None:
        """A snapshot in this folder, in place of the one before: a file in the format of safetensors, whole or not there."""
        tensors = [tensor for array in self._arrays.values() for tensor in array.tensors().values()]
        named = {f"{number:06}": tensor for number, tensor in enumerate(tensors)}
        shards.write(snapshot_of(folder, self.index), named, {"state": json.dumps(self._header())})

    @classmethod
    def read_snapshot(cls, folder: Path, index: int) -> Store:
        """Raises ValueError for one that is damaged."""
        header, arrays = _read_header(folder, index), shards.read(snapshot_of(folder, index))
        return cls._from(header, [arrays[name] for name in sorted(arrays)])


def snapshot_of(folder: Path, index: int) -> Path:
    return folder / f"server-{index}.safetensors"


def _read_header(folder: Path, index: int) -> dict[str, Any]:
    path = snapshot_of(folder, index)
    try:
        header: dict[str, Any] = json.loads(shards.read_metadata(path)["state"])
    except KeyError:
        raise ValueError(f"{path} is no snapshot of a parameter server") from None
    return header


def updates_in(folder: Path, index: int, servers: int) -> int:
    """Of a snapshot; -1 where there is none. Raises ValueError for one that is damaged or of another number of servers."""
    if not snapshot_of(folder, index).exists():
        return -1
    header = _read_header(folder, index)
    if header["servers"] != servers:
        raise ValueError(f"{folder} has snapshots of {header['servers']} parameter servers: go on with --servers {header['servers']}")
    return int(header["updates"])
