"""Calls of the engine from TensorFlow: at once in eager mode, by a callback on the host where a graph runs.

Nothing is compiled for a version of TensorFlow. A callback gets the tensors' memory without a copy, and TensorFlow takes over the memory of
its results where it is aligned. In a ``tf.function`` callbacks run one after the other in the order of the program, because TensorFlow
orders what is stateful.
"""

from __future__ import annotations

import itertools
import threading
import warnings
from concurrent import futures
from concurrent.futures import Future
from typing import Any, Callable, Sequence, TypeVar

import numpy as np
import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.ops import control_flow_util

from collective_core import _native
from collective_core.common import elastic_states, framework_threads
from collective_core.errors import CollectiveError, InvalidUseError
from collective_core.runtime import operations

#: Failures in callbacks, of which TensorFlow keeps only the text, the newest last.
_failures: list[CollectiveError] = []
MAX_FAILURES = 16
#: How long a thread of TensorFlow waits for a collective of a TensorFlow 1 graph before other operations get their turn.
POLL_SECONDS = 0.0005

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
    compiles, which can call nothing on the host. What ``function`` raises is raised in eager mode, a :class:`CollectiveError` as one that
    is a ``tf.errors.FailedPreconditionError`` (the ranks disagree), ``InvalidArgumentError`` or ``UnknownError``, too; in a graph
    TensorFlow makes it an ``UnknownError`` (an ``InvalidArgumentError`` of wrong use) with the same text.
    """
    if tf.executing_eagerly():
        try:
            results = function(*(np.asarray(tensor) for tensor in tensors))
        except CollectiveError as error:
            raise _also_of_tensorflow(error) from None
        return [tf.convert_to_tensor(result, dtype) for result, dtype in zip(results, dtypes)]
    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        text = "XLA cannot call collectives: leave jit_compile=True away (Keras: model.compile(..., jit_compile=False))"
        raise CollectiveError(text, "invalid")
    framework_threads.watch_signals()
    wrapped = _in_callback(function, dtypes)
    if is_stateful and not isinstance(tf.compat.v1.get_default_graph(), FuncGraph):
        results = _call_in_background(wrapped, list(tensors), list(dtypes))
    else:
        results = tf.numpy_function(wrapped, list(tensors), list(dtypes), stateful=is_stateful)
    for result, shape in zip(results, shapes):
        result.set_shape(shape)
    return list(results)


def _also_of_tensorflow(error: CollectiveError) -> CollectiveError:
    """The same error as one that programs written for Horovod catch, too."""
    kinds = {"mismatch": tf.errors.FailedPreconditionError, "invalid": tf.errors.InvalidArgumentError}
    of_tensorflow = kinds.get(error.kind, tf.errors.UnknownError)
    both = type(type(error).__name__, (type(error), of_tensorflow), {"__module__": type(error).__module__})
    made: CollectiveError = BaseException.__new__(both)
    of_tensorflow.__init__(made, None, None, str(error))
    vars(made).update(vars(error))
    return made.with_traceback(error.__traceback__)


def _in_callback(function: HostFunction, dtypes: Sequence[Any]) -> Callable[..., list[Any]]:
    wanted = [dtype.as_numpy_dtype for dtype in dtypes]

    def collective(*arrays: Any) -> list[Any]:
        try:
            with framework_threads.in_callback():
                results = function(*arrays)
        except CollectiveError as error:
            del _failures[: 1 - MAX_FAILURES]
            _failures.append(error)
            raise
        return [np.asarray(result, dtype) for result, dtype in zip(results, wanted)]

    return collective


def _turns(graph: Any) -> Any:
    """The iterator of a graph that gives nothing but time."""
    if not hasattr(graph, "_collective_turns"):  # not in a collection, which a Saver would write
        options = tf.data.Options()
        options.autotune.enabled = False
        options.experimental_optimization.apply_default_optimizations = False
        with graph.as_default(), tf.control_dependencies(None):
            graph._collective_turns = tf.compat.v1.data.make_one_shot_iterator(tf.data.Dataset.range(1).repeat().with_options(options))
    return graph._collective_turns


def _call_in_background(function: HostFunction, tensors: list[Any], dtypes: list[Any]) -> Any:
    """As ``tf.numpy_function``, in a thread of its own, for graphs of TensorFlow 1, where nothing orders collectives.

    A callback that waited would keep a thread of TensorFlow, and with more collectives than threads each rank could wait for what another
    has not started. Here a loop asks whether the result is there, and gives its thread back each time.
    """
    pending: dict[int, Future[Any]] = {}  # more than one where several sessions run the graph at a time
    numbers = itertools.count(1)

    def start(*arrays: Any) -> Any:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                with operations.watched(lambda: False, _native.AMONG_OTHERS):  # of threads that TensorFlow has not started yet
                    future.set_result(function(*arrays))
            except BaseException as error:  # noqa: BLE001 - raised in finish
                future.set_exception(error)

        number = next(numbers)
        pending[number] = future
        threading.Thread(target=run, name="collective", daemon=True).start()
        return np.asarray(number, np.int64)

    def is_done(number: Any) -> Any:
        return np.asarray(bool(futures.wait([pending[int(number)]], POLL_SECONDS).done))

    number = tf.numpy_function(start, tensors, tf.int64)
    turns = _turns(tf.compat.v1.get_default_graph())

    def ask_again(_: Any) -> Any:
        # The iterator's own thread schedules what follows, behind all that is ready; without it the loop would keep its thread.
        with warnings.catch_warnings():  # of many `get_next`, which elsewhere are a mistake
            warnings.simplefilter("ignore")
            turn = turns.get_next()
        with tf.control_dependencies([turn]):
            done = tf.numpy_function(is_done, [number], tf.bool)
        done.set_shape([])
        return done

    (done,) = tf.while_loop(tf.logical_not, ask_again, [tf.constant(False)], parallel_iterations=1)
    with tf.control_dependencies([done]):
        return tf.numpy_function(lambda number: pending.pop(int(number)).result(), [number], dtypes)


def error_of_engine(error: BaseException) -> CollectiveError | None:
    """The engine's error, of which TensorFlow has made this one; None if it is of something else.

    ``hvd.elastic.run`` uses it; so can a program that catches ``tf.errors.OpError`` around a ``tf.function``.
    """
    if isinstance(error, CollectiveError):
        return error
    if not isinstance(error, tf.errors.OpError):
        return None
    return next((failure for failure in reversed(_failures) if str(failure) in error.message), None)


elastic_states.translations.append(error_of_engine)


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
