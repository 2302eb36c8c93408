"""Collectives on tensors of Keras's backend, with Horovod's names and arguments: one call may be for TensorFlow, JAX or PyTorch."""

from __future__ import annotations

from typing import Any

import keras

from collective_core.arrays import Average, Sum
from collective_core.keras.requirement import framework


def _tensor(value: Any) -> Any:
    tensor = keras.ops.convert_to_tensor(value)
    if keras.backend.backend() == "torch" and tensor.device.type == "meta":  # while Keras looks for shapes
        raise ValueError("a collective cannot be part of a model that Keras builds symbolically")
    return tensor


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: str | None = None,
    compression: Any = framework.Compression.none,
) -> Any:
    """Combines the ranks' values (``op``: Average unless given) element by element; returns a tensor of the backend."""
    if average is not None and op is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    chosen = op or (Sum if average is False else Average)
    factors = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    return framework.allreduce(_tensor(value), name=name, op=chosen, compression=compression, **factors)


def allgather(value: Any, name: str | None = None) -> Any:
    """All ranks' values one after the other along the first dimension, which may differ between ranks."""
    return framework.allgather(_tensor(value), name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """The root's value on every rank."""
    return framework.broadcast(_tensor(value), root_rank, name=name)


def reducescatter(value: Any, name: str | None = None, op: str = Average) -> Any:
    """This rank's rows of what :func:`allreduce` would give: as even as can be, the first ranks get one more."""
    return framework.reducescatter(_tensor(value), name=name, op=op)
