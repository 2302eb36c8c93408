"""Variables of models and optimizers of Keras, on the host."""

from __future__ import annotations

from typing import Any, Sequence

import keras
import numpy as np

from collective_core import arrays
from collective_core.common.objects import allgather_object
from collective_core.errors import CollectiveError
from collective_core.runtime.process_sets import ProcessSet


def synchronize(model: Any) -> None:
    """Brings the variables up to date, which with JAX are elsewhere while a model is trained."""
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()


def read(variables: Sequence[Any]) -> list[np.ndarray[Any, Any]]:
    """Copies of their values."""
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]


def write(variables: Sequence[Any], values: Sequence[Any]) -> None:
    """Sets the values, which must be of the variables' shapes."""
    for variable, value in zip(variables, values):
        variable.assign(value)


def of_model(model: Any, optimizer: Any = None) -> list[Any]:
    """The weights of a model and the variables of its optimizer, not what random numbers are made from: ranks have their own."""
    chosen = optimizer if optimizer is not None else getattr(model, "optimizer", None)
    return [*model.weights, *([] if chosen is None else chosen.variables)]


def broadcast_variables(variables: Sequence[Any], root_rank: int = 0, process_set: ProcessSet | None = None) -> None:
    """Gives the variables the root's values. Raises :class:`CollectiveError` on every rank when their number or shapes differ."""
    listed = list(variables)
    mine = [(number, tuple(variable.shape), str(variable.dtype)) for number, variable in enumerate(listed)]
    for rank, others in enumerate(allgather_object(mine, process_set=process_set)):
        different = sorted(set(mine) ^ set(others))
        if different:
            number, shape, dtype = different[0]
            text = f"the variables of rank {rank} of the set differ from this one's, the first in number {number}: {dtype}{list(shape)}"
            raise CollectiveError(f"broadcast_variables: {text}", "mismatch")
    values = read(listed)
    for value in values:
        arrays.broadcast(value, root_rank, process_set=process_set, out=value)
    write(listed, values)


def broadcast_global_variables(root_rank: int) -> None:
    """Horovod's, for the graphs of TensorFlow 1. Raises RuntimeError: Keras 3 knows no global variables."""
    raise RuntimeError(
        f"Keras 3 has no global variables: call hvd.broadcast_variables(model.weights, root_rank={root_rank}), or train with "
        f"hvd.callbacks.BroadcastGlobalVariablesCallback({root_rank})"
    )
