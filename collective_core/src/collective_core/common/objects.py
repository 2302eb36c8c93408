"""Python objects of all ranks.

Objects are pickled, with cloudpickle where it is installed, which can do functions, too; they are unpickled only from ranks that
have proven that they belong to the job.
"""

from __future__ import annotations

import pickle
from typing import Any, Callable

import numpy as np

from collective_core import arrays
from collective_core.runtime import membership
from collective_core.runtime.process_sets import ProcessSet, members_of


def broadcast_object(obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet | None = None) -> Any:
    """The root's object on every rank. The root gets its own object back, others an unpickled copy."""
    name = name or membership.next_name("broadcast_object", members_of(process_set).id)
    is_root = membership.rank() == root_rank
    payload = _to_bytes(obj) if is_root else np.empty(0, dtype=np.uint8)
    length = arrays.broadcast(np.array([payload.size], dtype=np.int64), root_rank, name + ".length", process_set)
    if not is_root:
        payload = np.empty(int(length[0]), dtype=np.uint8)
    arrays.broadcast(payload, root_rank, name + ".bytes", process_set, out=payload)
    return obj if is_root else _from_bytes(payload)


def broadcast_object_fn(root_rank: int = 0, name: str | None = None, process_set: ProcessSet | None = None) -> Callable[[Any], Any]:
    """A function of an object that calls :func:`broadcast_object` with these arguments."""
    return lambda obj: broadcast_object(obj, root_rank, name, process_set)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet | None = None) -> list[Any]:
    """Every rank's object, by rank."""
    name = name or membership.next_name("allgather_object", members_of(process_set).id)
    payload = _to_bytes(obj)
    lengths = arrays.allgather(np.array([payload.size], dtype=np.int64), name + ".lengths", process_set)
    everyone = arrays.allgather(payload, name + ".bytes", process_set)
    return [_from_bytes(part) for part in np.split(everyone, np.cumsum(lengths)[:-1])]


def _to_bytes(obj: Any) -> np.ndarray[Any, Any]:
    try:
        from cloudpickle import dumps
    except ImportError:
        from pickle import dumps
    return np.frombuffer(bytearray(dumps(obj)), dtype=np.uint8)


def _from_bytes(payload: np.ndarray[Any, Any]) -> Any:
    # The sender is a rank that knows the job's secret (csrc/transport/tcp/handshake.h).
    return pickle.loads(payload.tobytes())  # noqa: S301
