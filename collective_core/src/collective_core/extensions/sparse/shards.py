"""Files of sharded tables: one per rank, in the format of safetensors, which a job with any number of ranks and any sharding can read.

A file is eight bytes with the length of its header, the header in JSON (of each tensor type, shape, and where its bytes begin and end), and
the bytes: plain data. Which rows and columns it holds follows from the placement, which whoever writes the file keeps elsewhere.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterator, Mapping

import numpy as np
import torch

from collective_core.extensions.sparse.sharding import Placement
from collective_core.torch.checkpoint import brought_to_disk

if TYPE_CHECKING:
    from collective_core.extensions.sparse.table import ShardedTable

_DTYPES: dict[str, Any] = {"F32": np.dtype("<f4"), "F64": np.dtype("<f8"), "I64": np.dtype("<i8")}
_METADATA = "__metadata__"
#: Bytes of a header: a hundred for each tensor.
MAX_HEADER = 1 << 24
#: Bytes that are read or written at once.
PIECE = 16 << 20


def write(path: Path, tensors: dict[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Brings a file to the disk, under another name first; returns its ``bytes`` and ``sha256``. ``metadata``: as of safetensors."""
    arrays = {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}
    names = {dtype: name for name, dtype in _DTYPES.items()}
    described: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name, array in arrays.items():
        described[name] = {"dtype": names[array.dtype], "shape": array.shape, "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    header = json.dumps(described).encode()
    header += b" " * (-len(header) % 8)
    digest, length = hashlib.sha256(), 0
    with brought_to_disk(path) as file:
        parts = (part for array in arrays.values() for part in _parts(array))
        content: Any
        for content in itertools.chain([len(header).to_bytes(8, "little"), header], parts):
            digest.update(content)
            length += file.write(content)
    return {"bytes": length, "sha256": digest.hexdigest()}


def _parts(array: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
    """Its bytes, some rows at a time: a table in a file, whose rows lie beside other things, would not fit in memory."""
    rows = np.atleast_1d(array)
    each = max(1, PIECE // max(1, rows[:1].nbytes))
    for begin in range(0, len(rows), each):
        yield np.ascontiguousarray(rows[begin : begin + each]).reshape(-1).view(np.uint8)


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """What it says, and how long it is."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(MAX_HEADER, size - 8):
            raise ValueError(f"{path} is damaged: its header has {length} bytes")
        text = file.read(length)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise ValueError(f"{path} is damaged: its header makes no sense")
    return header, length


def read_metadata(path: Path) -> dict[str, str]:
    """What :func:`write` was given beside tensors. Raises as :func:`read`."""
    found = _header(path)[0].get(_METADATA, {})
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ValueError(f"{path} is damaged: its header makes no sense")
    return found


def read(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of a file, mapped into memory. Raises ValueError, saying why, for one that is not what was written."""
    header, length = _header(path)
    size = path.stat().st_size
    found = {}
    try:
        for name, described in header.items():
            if name == _METADATA:
                continue
            begin, end = described["data_offsets"]
            dtype, shape = _DTYPES[described["dtype"]], tuple(described["shape"])
            if not 0 <= begin <= end <= size - 8 - length or end - begin != dtype.itemsize * int(np.prod(shape)):
                raise ValueError
            # An empty file cannot be mapped.
            empty = np.empty(shape, dtype)
            found[name] = empty if begin == end else np.memmap(path, dtype, "r", 8 + length + begin, shape)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path} is damaged: its header makes no sense") from None
    return found


def contents(tables: Mapping[str, ShardedTable]) -> dict[str, torch.Tensor]:
    """This rank's part of tables, by names of tensors."""
    return {f"{key}/{name}": tensor for key, table in tables.items() for name, tensor in table.tensors().items()}


def take(tables: Mapping[str, ShardedTable], written: dict[str, Any], path: Path, writer: int) -> None:
    """Has these tables take what they have of the file that rank ``writer`` has ``written``, as the checkpoint describes them.

    Raises ValueError where it does not hold what they need.
    """
    found = read(path)
    for key, table in tables.items():
        prefix = f"{key}/"
        arrays = {name[len(prefix) :]: array for name, array in found.items() if name.startswith(prefix)}
        try:
            table.take(arrays, _placement(written[key]), writer)
        except ValueError as error:
            raise ValueError(f"{path}, {key}: {error}") from error


def _placement(written: dict[str, Any]) -> Placement:
    fields = {name: written[name] for name in Placement._fields}
    pairs = tuple((int(first), int(end)) for first, end in fields["column_ranges"])
    return Placement(**{**fields, "row_bounds": tuple(fields["row_bounds"]), "column_ranges": pairs})
