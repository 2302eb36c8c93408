"""The collectives on TensorFlow tensors, in eager mode, in ``tf.function`` and in the graphs of TensorFlow 1, with their gradients.

Every function is collective over its process set: all ranks call it, with the same name (or none), type and shape. ``device_dense`` and
``device_sparse`` are Horovod's; tensors travel from the host's memory. ``ignore_name_scope``: the operation's name on other ranks is
``name`` alone, whatever name scope it is in.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence

import numpy as np
import tensorflow as tf

from collective_core import arrays
from collective_core.arrays import Average, Max, Min, Product, Sum
from collective_core.common.groups import grouped_allreduce as grouped_allreduce_of_arrays
from collective_core.common.sparse import sparse_allreduce
from collective_core.runtime import membership, process_sets
from collective_core.runtime.process_sets import ProcessSet, global_process_set, members_of
from collective_core.runtime.reductions import Reduction, takes
from collective_core.tensorflow.compression import Compression
from collective_core.tensorflow.engine_calls import as_tensor, call, name_of, not_converted

__all__ = ["Average", "Max", "Min", "Product", "Sum"]

_DEFAULTS: dict[str, Any] = {"compression": Compression.none, "process_set": global_process_set}


def _unknown_rows(tensor: Any) -> Any:
    """The static shape without the number of rows."""
    return tensor.shape if tensor.shape.rank is None else [None, *tensor.shape[1:]] if tensor.shape.rank else tensor.shape


@not_converted
@takes(
    "average device_dense device_sparse compression op prescale_factor postscale_factor name process_set ignore_name_scope",
    **_DEFAULTS,
)
def allreduce(tensor: Any, how: Reduction, compression: Any, name: str | None, ignore_name_scope: bool) -> Any:
    """Combines the tensors of all ranks element by element. ``op`` is Average unless given. Differentiable for Sum and Average.

    The average of integer tensors is rounded towards zero. Of ``tf.IndexedSlices`` the sum or average is ``tf.IndexedSlices`` with every
    index once; averages of integers in them are floating-point numbers, as Horovod's.
    """
    return _allreduce_any([tensor], how, compression, name, ignore_name_scope)[0]


@not_converted
@takes(
    "average device_dense device_sparse compression op prescale_factor postscale_factor process_set ignore_name_scope name",
    **_DEFAULTS,
)
def grouped_allreduce(tensors: Sequence[Any], how: Reduction, compression: Any, name: str | None, ignore_name_scope: bool) -> list[Any]:
    """:func:`allreduce` of several tensors: those of one type travel as one, in one callback.

    ``tf.IndexedSlices`` go before them, each in a callback of its own, in the order of ``tensors``.
    """
    return _allreduce_any(tensors, how, compression, name, ignore_name_scope)


def _allreduce_any(tensors: Sequence[Any], how: Reduction, compression: Any, name: str | None, ignore_name_scope: bool) -> list[Any]:
    results = list(tensors)
    dense = [number for number, tensor in enumerate(results) if not isinstance(tensor, tf.IndexedSlices)]
    before: list[Any] = []  # nothing else orders callbacks in graphs of TensorFlow 1
    for number in [number for number in range(len(results)) if number not in set(dense)]:
        with tf.control_dependencies(before):
            results[number] = _allreduce_slices(results[number], f"{name}.{number}" if name else None, how, ignore_name_scope)
        before = [results[number].values]
    if dense:
        pairs = [compression.compress(as_tensor(results[number])) for number in dense]
        with tf.control_dependencies(before):
            reduced = _allreduce([small for small, _ in pairs], how, name, ignore_name_scope)
        for number, output, (_, context) in zip(dense, reduced, pairs):
            results[number] = compression.decompress(output, context)
    return results


def _allreduce(tensors: Sequence[Any], how: Reduction, name: str | None = None, ignore_name_scope: bool = False) -> list[Any]:
    @tf.custom_gradient  # type: ignore[untyped-decorator,unused-ignore]
    def reduce(*inputs: Any) -> Any:
        chosen = name_of("allreduce" if len(inputs) == 1 else "grouped_allreduce", name, ignore_name_scope)

        def on_host(*values: Any) -> list[Any]:
            return grouped_allreduce_of_arrays(values, chosen, *how)

        def gradient(*gradients: Any) -> Any:
            how.require_gradient("an allreduce")
            return _allreduce(gradients, how)

        return call(on_host, inputs, [each.dtype for each in inputs], [each.shape for each in inputs]), gradient

    results: list[Any] = reduce(*tensors)
    return results


def _allreduce_slices(slices: Any, name: str | None, how: Reduction, ignore_name_scope: bool) -> Any:
    if (how.prescale, how.postscale) != (1.0, 1.0):
        raise NotImplementedError("prescale_factor and postscale_factor are not possible with tf.IndexedSlices")
    if how.op not in (Sum, Average):
        raise NotImplementedError(f"op={how.op} is not possible with tf.IndexedSlices; use Sum or Average")
    values, indices = as_tensor(slices.values), as_tensor(slices.indices)
    if how.op == Average and values.dtype.is_integer:
        values = tf.cast(values, tf.float32 if values.dtype.size < 4 else tf.float64)
    dense_shape = None if slices.dense_shape is None else tf.convert_to_tensor(slices.dense_shape)
    inputs = [values, indices, *([] if dense_shape is None else [dense_shape])]
    chosen = name_of("sparse_allreduce", name, ignore_name_scope)

    def on_host(values: Any, indices: Any, *shape: Any) -> list[Any]:
        known = [int(length) for length in shape[0]] if shape else []
        merged, total = sparse_allreduce(indices, values, known, chosen, how.op, how.process_set)
        return [total, merged]

    total, merged = call(on_host, inputs, [values.dtype, indices.dtype], [_unknown_rows(values), [None]])
    return tf.IndexedSlices(total, merged, dense_shape)


@not_converted
def allgather(tensor: Any, name: str | None = None, ignore_name_scope: bool = False, process_set: ProcessSet = global_process_set) -> Any:
    """All ranks' tensors one after the other along the first dimension, which may differ between ranks.

    The gradient is, as in Horovod, this rank's part of the average of all ranks' gradients.
    """
    return grouped_allgather([tensor], name, ignore_name_scope, process_set)[0]


@not_converted
def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, ignore_name_scope: bool = False, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """:func:`allgather` of several tensors, in one callback."""
    if not tensors:
        return []

    @tf.custom_gradient  # type: ignore[untyped-decorator,unused-ignore]
    def gather(*inputs: Any) -> Any:
        chosen = name_of("allgather", name, ignore_name_scope)

        def on_host(*values: Any) -> list[Any]:
            return [arrays.allgather(each, member, process_set) for each, member in zip(values, _names(chosen, len(values)))]

        def gradient(*gradients: Any) -> Any:
            averages = _allreduce(gradients, Reduction(Average, 1.0, 1.0, process_set))
            rows = [tf.shape(each, tf.int64)[:1] for each in inputs]
            return [_own_part(average, mine, process_set) for average, mine in zip(averages, rows)]

        return call(on_host, inputs, [each.dtype for each in inputs], [_unknown_rows(each) for each in inputs]), gradient

    return list(gather(*map(as_tensor, tensors)))


def _names(name: str | None, count: int) -> list[str | None]:
    """The names of a group's members."""
    return [name] if count == 1 else [f"{name}.{number}" if name else None for number in range(count)]


def _own_part(gathered: Any, rows: Any, process_set: ProcessSet) -> Any:
    """The rows of ``gathered`` that came from this rank, of which ``rows`` is the number, shape (1,)."""

    def begin_on_host(mine: Any) -> list[Any]:
        everyone = arrays.allgather(mine, chosen, process_set)
        return [np.asarray(everyone[: members_of(process_set).rank].sum(), np.int64)]

    chosen = name_of("allgather_rows", None)
    (begin,) = call(begin_on_host, [rows], [tf.int64], [[]])
    return gathered[begin : begin + rows[0]]


@not_converted
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The root's tensor on every rank; all ranks pass one of the same type and shape.

    The gradient is, as in Horovod, on the root the average of all ranks' gradients, elsewhere zero.
    """

    @tf.custom_gradient  # type: ignore[untyped-decorator,unused-ignore]
    def send(given: Any) -> Any:
        chosen = name_of("broadcast", name, ignore_name_scope)

        def gradient(upstream: Any) -> Any:
            (average,) = _allreduce([upstream], Reduction(Average, 1.0, 1.0, process_set))
            if membership.rank() == root_rank:
                return average
            with tf.control_dependencies([average]):  # a graph of TensorFlow 1 would leave out what nothing depends on
                return tf.zeros_like(upstream)

        return call(lambda value: [arrays.broadcast(value, root_rank, chosen, process_set)], [given], [given.dtype], [given.shape])[
            0
        ], gradient

    return send(as_tensor(tensor))


@not_converted
def broadcast_(
    variables: Sequence[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Overwrites variables with the root's, in one callback; returns their new values."""
    variables = list(variables)
    if not variables:
        return []
    values = [as_tensor(variable) for variable in variables]
    chosen = name_of("broadcast_variables", name)

    def on_host(*given: Any) -> list[Any]:
        return [arrays.broadcast(each, root_rank, member, process_set) for each, member in zip(given, _names(chosen, len(given)))]

    received = call(on_host, values, [each.dtype for each in values], [each.shape for each in values])
    return [_assign(variable, value) for variable, value in zip(variables, received)]


def _assign(variable: Any, value: Any) -> Any:
    """The variable's new value, which in the graphs of TensorFlow 1 is what runs the assignment."""
    assigned = variable.assign(value)
    return value if assigned is None else assigned  # Keras's variables give nothing


@not_converted
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends ``splits[r]`` rows to every rank r; returns what came from all ranks, in rank order.

    With ``splits``, a list or a tensor of integers, returns a pair: the tensor, and the rows from each rank as a tensor of int32. Without,
    every rank is sent the same number of rows. Gradients go back the way that the rows came.
    """

    @tf.custom_gradient  # type: ignore[untyped-decorator,unused-ignore]
    def exchange(given: Any, *rows: Any) -> Any:
        chosen = name_of("alltoall", name, ignore_name_scope)

        def on_host(value: Any, *wanted: Any) -> list[Any]:
            received, counts = arrays.alltoall(value, wanted[0].tolist() if wanted else None, chosen, process_set)
            return [received, np.asarray(counts, np.int32)]

        received, counts = call(on_host, [given, *rows], [given.dtype, tf.int32], [_unknown_rows(given), [None]])

        def gradient(upstream: Any, _: Any) -> Any:
            returned, _ = alltoall(upstream, counts, process_set=process_set)
            return [returned, *(None for _ in rows)]

        return (received, counts), gradient

    given = [] if splits is None else [tf.convert_to_tensor(splits, None if tf.is_tensor(splits) else tf.int32)]
    received, counts = exchange(as_tensor(tensor), *given)
    return received if splits is None else (received, counts)


@not_converted
@takes(
    "device_dense compression op name process_set ignore_name_scope prescale_factor postscale_factor",
    **_DEFAULTS,
)
def reducescatter(tensor: Any, how: Reduction, compression: Any, name: str | None, ignore_name_scope: bool) -> Any:
    """This rank's rows of the reduced tensor: as even as can be, the first ranks get one row more. Differentiable for Sum and Average."""
    return _reducescatter([tensor], how, compression, name, ignore_name_scope)[0]


@not_converted
@takes("device_dense compression op process_set prescale_factor postscale_factor", **_DEFAULTS)
def grouped_reducescatter(tensors: Sequence[Any], how: Reduction, compression: Any) -> list[Any]:
    """:func:`reducescatter` of several tensors, in one callback."""
    return _reducescatter(tensors, how, compression, None, False)


def _reducescatter(tensors: Sequence[Any], how: Reduction, compression: Any, name: str | None, ignore_name_scope: bool) -> list[Any]:
    if not tensors:
        return []

    @tf.custom_gradient  # type: ignore[untyped-decorator,unused-ignore]
    def scatter(*inputs: Any) -> Any:
        chosen = name_of("reducescatter", name, ignore_name_scope)

        def on_host(*values: Any) -> list[Any]:
            return [arrays.reducescatter(each, member, *how) for each, member in zip(values, _names(chosen, len(values)))]

        def gradient(*gradients: Any) -> Any:
            how.require_gradient("a reducescatter")
            # Every input element went into one rank's result; of a sum, times the ranks (Horovod).
            factor = how.prescale * how.postscale * (members_of(how.process_set).size if how.op == Sum else 1)
            scaled = [each * tf.cast(factor, each.dtype) for each in gradients]
            return grouped_allgather(scaled, process_set=how.process_set or global_process_set)

        return call(on_host, inputs, [each.dtype for each in inputs], [_unknown_rows(each) for each in inputs]), gradient

    pairs = [compression.compress(as_tensor(tensor)) for tensor in tensors]
    reduced = scatter(*(small for small, _ in pairs))
    return [compression.decompress(output, context) for output, (_, context) in zip(reduced, pairs)]


@not_converted
def join() -> Any:
    """For a rank that has run out of data: takes part in what the others still do until all have joined.

    Returns the rank that joined last, as a tensor of int32. Averages are over the ranks that have not joined.
    """
    return call(lambda: [np.asarray(arrays.join(), np.int32)], [], [tf.int32], [[]])[0]


@not_converted
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when every rank of the process set has called it."""

    def on_host() -> list[Any]:
        arrays.barrier(process_set=process_set)
        return [np.int32(0)]

    call(on_host, [], [tf.int32], [[]])


def _number(ask: Callable[[], int]) -> Any:
    return call(lambda: [np.asarray(ask(), np.int32)], [], [tf.int32], [[]])[0]


@not_converted
def size_op(process_set_id: int = 0, name: str | None = None) -> Any:  # noqa: ARG001
    """The number of ranks in the process set when the graph runs, not when it is made."""
    return _number(lambda: process_sets.process_set_by_id(process_set_id).size() or 0)


@not_converted
def rank_op(name: str | None = None) -> Any:  # noqa: ARG001
    """This process's number when the graph runs."""
    return _number(membership.rank)


@not_converted
def local_rank_op(name: str | None = None) -> Any:  # noqa: ARG001
    """This process's number on its host when the graph runs."""
    return _number(membership.local_rank)


@not_converted
def local_size_op(name: str | None = None) -> Any:  # noqa: ARG001
    """Processes on this host when the graph runs."""
    return _number(membership.local_size)


@not_converted
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:  # noqa: ARG001
    """1 if this process is in the process set when the graph runs, else 0."""
    return _number(lambda: int(bool(process_sets.process_set_by_id(process_set_id).included())))
