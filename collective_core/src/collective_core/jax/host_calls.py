"""Calls of host functions from JAX programs: at once for arrays that have values, from the compiled program for traced ones.

A program's calls are made in the order in which it has them, those of compiled functions too (an ordered effect of JAX): ranks that run the
same program make the same calls in the same order. On CPUs a call reads and writes the program's own buffers. On other devices JAX copies
arrays to host memory and back.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.experimental import io_callback
from jax.experimental.buffer_callback import buffer_callback

from collective_core.common import framework_threads
from collective_core.errors import CollectiveError, InvalidUseError

#: Reads the first arrays, and writes all of the second.
HostFunction = Callable[[Sequence[np.ndarray[Any, Any]], Sequence[np.ndarray[Any, Any]]], None]

#: JAX takes over memory that begins at a multiple of so many bytes without copying it.
ALIGNMENT = 64

_NUMBER = jax.ShapeDtypeStruct((), np.int32)

#: The newest failure of a call that a compiled program made: JAX raises an error of its own, with the text of this one.
_failure: CollectiveError | None = None


def is_traced(arrays: Sequence[Any]) -> bool:
    """Whether any of these stands for a value that a compiled function will have, or there is such a function around the call."""
    return any(isinstance(array, jax.core.Tracer) for array in (*arrays, jnp.zeros(())))


def wait() -> None:
    """Waits until compiled functions that were called have made their calls; raises JaxRuntimeError if one has failed."""
    jax.effects_barrier()


def take_failure(error: Exception) -> CollectiveError | None:
    """The engine's error that JAX has raised as one of its own; None if the error is of something else."""
    global _failure
    failure = _failure
    if failure is None or not isinstance(error, jax.errors.JaxRuntimeError) or str(failure) not in str(error):
        return None
    _failure = None
    return failure


def call(
    function: HostFunction, operands: Sequence[Any], results: Sequence[jax.ShapeDtypeStruct], is_elementwise: bool = False
) -> list[Any]:
    """What ``function`` writes from what it reads. Raises its CollectiveError; from a compiled program, JAX raises a JaxRuntimeError.

    ``is_elementwise``: results have their operands' shapes, and any shapes will do: then it may be under ``vmap``.
    """
    if not is_traced(operands):
        wait()
        targets = [empty(result.shape, result.dtype) for result in results]
        function([np.asarray(operand) for operand in operands], targets)
        return [to_device(target, operands) for target in targets]
    how = _call_on_buffers if jax.default_backend() == "cpu" else _call_on_copies

    def under_vmap(size: int, is_mapped: Sequence[bool], *arrays: Any) -> Any:
        if not is_elementwise:
            raise InvalidUseError("only allreduce and broadcast can be under vmap: call this collective outside of it", "invalid")
        mapped = [array if has_axis else jnp.broadcast_to(array, (size, *array.shape)) for array, has_axis in zip(arrays, is_mapped)]
        shapes = [jax.ShapeDtypeStruct((size, *result.shape), result.dtype) for result in results]
        return call(function, mapped, shapes, is_elementwise), [True] * len(results)

    traced: Any = custom_vmap(lambda *arrays: how(function, arrays, results))
    traced.def_vmap(under_vmap)
    outputs: list[Any] = traced(*operands)
    return outputs


def empty(shape: Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
    """A new array that :func:`to_device` need not copy."""
    kind = np.dtype(dtype)
    length = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    memory = np.empty(length + ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    made: np.ndarray[Any, Any] = memory[begin : begin + length].view(kind).reshape(shape)
    return made


def to_device(array: np.ndarray[Any, Any], beside: Sequence[Any] = ()) -> Any:
    """A jax.Array of it, which nothing may write to any more, where the first of ``beside`` is if that is one device."""
    for other in beside:
        if isinstance(other, jax.Array) and len(other.sharding.device_set) == 1:
            return jax.device_put(array, other.sharding)
    return jax.device_put(array, jax.local_devices()[0])


def _noting_failures(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*arguments: Any) -> Any:
        global _failure
        try:
            with framework_threads.in_callback():
                return function(*arguments)
        except CollectiveError as error:
            _failure = error
            raise

    return wrapped


def _call_on_buffers(function: HostFunction, operands: Sequence[Any], results: Sequence[jax.ShapeDtypeStruct]) -> list[Any]:
    """``buffer_callback`` has the program's memory but no order: it is put between two ordered callbacks, by a number."""

    def on_buffers(_: Any, targets: Any, turn: Any, *sources: Any) -> None:
        *outputs, done = map(np.asarray, targets)
        function([np.asarray(source) for source in sources], outputs)
        done[...] = np.asarray(turn)

    turn = io_callback(lambda: np.int32(0), _NUMBER, ordered=True)
    on_memory = buffer_callback(_noting_failures(on_buffers), [*results, _NUMBER], has_side_effect=True)
    made: list[Any] = on_memory(turn, *operands)
    io_callback(lambda _: None, None, made[-1], ordered=True)
    return made[:-1]


def _call_on_copies(function: HostFunction, operands: Sequence[Any], results: Sequence[jax.ShapeDtypeStruct]) -> list[Any]:
    def on_copies(*sources: Any) -> list[np.ndarray[Any, Any]]:
        outputs = [np.empty(result.shape, result.dtype) for result in results]
        function([np.asarray(source) for source in sources], outputs)
        return outputs

    outputs: list[Any] = io_callback(_noting_failures(on_copies), list(results), *operands, ordered=True)
    return outputs
