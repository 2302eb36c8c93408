"""Messages between workers and servers: a header in JSON and arrays of numbers. Plain data; nothing is unpickled.

A message is eight bytes with the length of its header, the header, and each array's bytes, all of them padded to eight bytes.
"""

from __future__ import annotations

import json
from typing import Any, Sequence

import numpy as np

Array = Any  # of NumPy

DTYPES = ("float32", "float64", "int64")
_ALIGNMENT = 8
_ARRAYS = "arrays"


def _padded(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT


def pack(header: dict[str, Any], arrays: Sequence[Array] = ()) -> Array:
    """The bytes of a message. Arrays are copied into them."""
    described = [[str(array.dtype), list(array.shape)] for array in arrays]
    text = json.dumps({**header, _ARRAYS: described}).encode()
    begin = _ALIGNMENT + _padded(len(text))
    message = np.zeros(begin + sum(_padded(array.nbytes) for array in arrays), np.uint8)
    message[:_ALIGNMENT].view("<u8")[0] = len(text)
    message[_ALIGNMENT : _ALIGNMENT + len(text)] = np.frombuffer(text, np.uint8)
    for array in arrays:
        message[begin : begin + array.nbytes].view(array.dtype)[:] = array.reshape(-1)
        begin += _padded(array.nbytes)
    return message


def unpack(message: Array) -> tuple[dict[str, Any], list[Array]]:
    """What :func:`pack` was given; the arrays are parts of ``message``. Raises ValueError for what is no message."""
    try:
        length = int(message[:_ALIGNMENT].view("<u8")[0])
        header = json.loads(message[_ALIGNMENT : _ALIGNMENT + length].tobytes())
        begin, arrays = _ALIGNMENT + _padded(length), []
        for name, shape in header.pop(_ARRAYS):
            dtype = np.dtype(DTYPES[DTYPES.index(name)])
            end = begin + dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            arrays.append(message[begin:end].view(dtype).reshape(shape))
            begin += _padded(end - begin)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise ValueError("a message between parameter servers and workers makes no sense") from None
    return header, arrays
