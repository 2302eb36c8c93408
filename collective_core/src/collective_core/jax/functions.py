"""Bringing all ranks to one state: trees of arrays and any object."""

from __future__ import annotations

from typing import Any

import jax

from collective_core.common import objects
from collective_core.errors import CollectiveError
from collective_core.jax import host_calls
from collective_core.jax.ops import broadcast
from collective_core.runtime.process_sets import ProcessSet


def broadcast_parameters(params: Any, root_rank: int = 0, process_set: ProcessSet | None = None) -> Any:
    """The root's tree of arrays and numbers on every rank, as a new tree: parameters, or the state of an optimizer.

    Raises :class:`CollectiveError` on every rank when the trees differ in places or shapes, and for leaves that cannot be sent.
    """
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
    everyone = allgather_object(paths, process_set=process_set)
    for rank, other in enumerate(everyone):
        if other != everyone[0]:
            differing = sorted(set(other) ^ set(everyone[0])) or ["the order"]
            text = f"broadcast_parameters: the ranks' trees differ, the first from number {rank}: {', '.join(differing[:5])}"
            raise CollectiveError(text, "mismatch")
    return broadcast(params, root_rank, "broadcast.parameters", process_set)


def broadcast_object(obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet | None = None) -> Any:
    """The root's object on every rank. The root gets its own object back, others an unpickled copy."""
    host_calls.wait()
    return objects.broadcast_object(obj, root_rank, name, process_set)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet | None = None) -> list[Any]:
    """Every rank's object, by rank."""
    host_calls.wait()
    return objects.allgather_object(obj, name, process_set)
