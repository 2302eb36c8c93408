"""Collectives on tensors of Keras's backend, with Horovod's names and arguments: one call may be for TensorFlow, JAX or PyTorch."""

from __future__ import annotations

from typing import Any

import keras

from collective_core.arrays import Average
from collective_core.keras.requirement import framework
from collective_core.runtime.reductions import chosen_op, takes


def _tensor(value: Any) -> Any:
    tensor = keras.ops.convert_to_tensor(value)
    if keras.backend.backend() == "torch" and tensor.device.type == "meta":  # while Keras looks for shapes
        raise ValueError("a collective cannot be part of a model that Keras builds symbolically")
    return tensor


@takes("name average prescale_factor postscale_factor op compression", compression=framework.Compression.none)
def allreduce(
    value: Any, name: str | None, average: bool | None, prescale_factor: float, postscale_factor: float, op: str | None, compression: Any
) -> Any:
    """Combines the ranks' values (``op``: Average unless given) element by element; returns a tensor of the backend."""
    factors = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    return framework.allreduce(_tensor(value), name=name, op=chosen_op(average, op), compression=compression, **factors)


def allgather(value: Any, name: str | None = None) -> Any:
    """All ranks' values one after the other along the first dimension, which may differ between ranks."""
    return framework.allgather(_tensor(value), name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """The root's value on every rank."""
    return framework.broadcast(_tensor(value), root_rank, name=name)


def reducescatter(value: Any, name: str | None = None, op: str = Average) -> Any:
    """This rank's rows of what :func:`allreduce` would give: as even as can be, the first ranks get one more."""
    return framework.reducescatter(_tensor(value), name=name, op=op)
