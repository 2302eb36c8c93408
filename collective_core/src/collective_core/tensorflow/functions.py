"""Bringing all ranks to one state: variables, and any object."""

from __future__ import annotations

from typing import Any, Callable, Iterable

import tensorflow as tf

from collective_core.common import objects
from collective_core.runtime.process_sets import ProcessSet, global_process_set
from collective_core.tensorflow.engine_calls import not_converted
from collective_core.tensorflow.mpi_ops import broadcast_


@not_converted
def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,  # noqa: ARG001 - Horovod's parameter; all go through one callback
) -> Any:
    """Overwrites variables, of TensorFlow or Keras, with the root's. In a graph of TensorFlow 1 returns the operation that does it.

    Raises :class:`CollectiveError` where types or shapes differ between ranks.
    """
    assigned = broadcast_(list(variables), root_rank, process_set=process_set)
    return None if tf.executing_eagerly() else tf.group(*assigned)


@not_converted
def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    session: Any = None,  # noqa: ARG001 - Horovod's parameter; objects travel without TensorFlow
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The root's object on every rank, at once also where a graph is made. The root gets its own object back, others an unpickled copy."""
    return objects.broadcast_object(obj, root_rank, name, process_set)


@not_converted
def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """A function of an object that calls :func:`broadcast_object` with these arguments."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


@not_converted
def allgather_object(
    obj: Any,
    session: Any = None,  # noqa: ARG001
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Every rank's object, by rank."""
    return objects.allgather_object(obj, name, process_set)
