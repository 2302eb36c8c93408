"""How the engine is called from TensorFlow: at once in eager mode, by a callback on the host where a graph runs.

Nothing is compiled for a version of TensorFlow. A callback gets the tensors' memory without a copy, and TensorFlow takes over the memory of
its results where it is aligned. In a ``tf.function`` callbacks run one after the other in the order of the program, because TensorFlow
orders what is stateful.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence, TypeVar

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from collective_core.common import callbacks, elastic
from collective_core.errors import CollectiveError, InvalidUseError

#: Failures in callbacks, of which TensorFlow keeps only the text, the newest last.
_failures: list[CollectiveError] = []
MOST_FAILURES = 16

_Function = TypeVar("_Function", bound=Callable[..., Any])


def not_converted(function: _Function) -> _Function:
    """The function, whose Python AutoGraph leaves as it is, where a ``tf.function`` calls it."""
    unconverted: _Function = tf.autograph.experimental.do_not_convert(function)
    return unconverted


HostFunction = Callable[..., Sequence[Any]]


def call(
    function: HostFunction, tensors: Sequence[Any], dtypes: Sequence[Any], shapes: Sequence[Any], is_stateful: bool = True
) -> list[Any]:
    """Calls ``function`` with the tensors' values, as arrays that it must not change; returns its results, as many arrays, as tensors.

    ``dtypes`` and ``shapes`` are those of the results; None for a shape that is not known. Raises :class:`CollectiveError` where XLA
    compiles, which can call nothing on the host. What ``function`` raises is raised in eager mode; in a graph TensorFlow makes it a
    ``tf.errors.UnknownError`` (an ``InvalidArgumentError`` of wrong use) with the same text.
    """
    if tf.executing_eagerly():
        results = function(*(np.asarray(tensor) for tensor in tensors))
        return [tf.convert_to_tensor(result, dtype) for result, dtype in zip(results, dtypes)]
    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        text = "XLA cannot call collectives: leave jit_compile=True away (Keras: model.compile(..., jit_compile=False))"
        raise CollectiveError(text, "invalid")
    callbacks.watch_signals()
    results = tf.numpy_function(_in_callback(function, dtypes), list(tensors), list(dtypes), stateful=is_stateful)
    for result, shape in zip(results, shapes):
        result.set_shape(shape)
    return list(results)


def _in_callback(function: HostFunction, dtypes: Sequence[Any]) -> Callable[..., list[Any]]:
    wanted = [dtype.as_numpy_dtype for dtype in dtypes]

    def collective(*arrays: Any) -> list[Any]:
        try:
            with callbacks.in_callback():
                results = function(*arrays)
        except CollectiveError as error:
            del _failures[: 1 - MOST_FAILURES]
            _failures.append(error)
            raise
        return [np.asarray(result, dtype) for result, dtype in zip(results, wanted)]

    return collective


def error_of_engine(error: BaseException) -> CollectiveError | None:
    """The engine's error, of which TensorFlow has made this one; None if it is of something else.

    ``hvd.elastic.run`` uses it; so can a program that catches ``tf.errors.OpError`` around a ``tf.function``.
    """
    if isinstance(error, CollectiveError):
        return error
    if not isinstance(error, tf.errors.OpError):
        return None
    return next((failure for failure in reversed(_failures) if str(failure) in error.message), None)


elastic.translations.append(error_of_engine)


def name_of(kind: str, name: str | None, ignore_name_scope: bool = False) -> str | None:
    """The name of an operation on all ranks: in a graph the ``name`` or the kind, with the name scope and a number that the graph gives.

    So it matters where the operation is in the program, not when it runs. The names of tensors would not do: those of captured ones differ.
    None in eager mode without a ``name``: then operations are numbered.
    """
    if tf.executing_eagerly() or (name is not None and ignore_name_scope):
        return name
    unique: str = tf.compat.v1.get_default_graph().unique_name(name or kind)
    return unique


def as_tensor(value: Any) -> Any:
    """The value as a dense tensor. Raises :class:`CollectiveError` for what has no values that could be sent."""
    tensor = tf.convert_to_tensor(value)
    if tensor.dtype in (tf.resource, tf.variant):
        raise InvalidUseError(f"tensors of {tensor.dtype.name} cannot be sent", "invalid")
    return tensor
