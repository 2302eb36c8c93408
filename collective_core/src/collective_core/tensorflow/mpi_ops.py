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
from collective_core.errors import CollectiveError
from collective_core.runtime import membership, process_sets
from collective_core.runtime.process_sets import ProcessSet, global_process_set, members_of
from collective_core.tensorflow.callbacks import as_tensor, call, name_of, not_converted
from collective_core.tensorflow.compression import Compression

__all__ = ["Average", "Max", "Min", "Product", "Sum"]


def reduction(op: str | None, average: bool | None) -> str:
    """The reduction that Horovod's two parameters ask for. Raises ValueError where both do."""
    if op is not None and average is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    return op if op is not None else (Average if average in (None, True) else Sum)


def _require_gradient(kind: str, op: str) -> None:
    if op not in (Sum, Average):
        raise CollectiveError(f"{kind} with op={op} has no gradient; use Sum or Average", "invalid")


def _unknown_rows(tensor: Any) -> Any:
    """The static shape without the number of rows."""
    return tensor.shape if tensor.shape.rank is None else [None, *tensor.shape[1:]] if tensor.shape.rank else tensor.shape


class _Request:
    """How to reduce: the arguments that allreduce and reducescatter share."""

    def __init__(self, op: str, prescale: float, postscale: float, process_set: ProcessSet, ignore_name_scope: bool) -> None:
        self.op = op
        self.factors = (prescale, postscale)
        self.process_set = process_set
        self.ignore_name_scope = ignore_name_scope


@not_converted
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Combines the tensors of all ranks element by element. ``op`` is Average unless given. Differentiable for Sum and Average.

    The average of integer tensors is rounded towards zero. Of ``tf.IndexedSlices`` the sum or average is ``tf.IndexedSlices`` with every
    index once; averages of integers in them are floating-point numbers, as Horovod's.
    """
    return grouped_allreduce(
        *([tensor], average, device_dense, device_sparse, compression, op, prescale_factor, postscale_factor, process_set),
        *(ignore_name_scope, name),
    )[0]


@not_converted
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",  # noqa: ARG001
    device_sparse: str = "",  # noqa: ARG001
    compression: Any = Compression.none,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """:func:`allreduce` of several tensors: those of one type travel as one, in one callback.

    ``tf.IndexedSlices`` go before them, each in a callback of its own, in the order of ``tensors``.
    """
    request = _Request(reduction(op, average), prescale_factor, postscale_factor, process_set, ignore_name_scope)
    results = list(tensors)
    dense = [number for number, tensor in enumerate(results) if not isinstance(tensor, tf.IndexedSlices)]
    before: list[Any] = []  # nothing else orders callbacks in graphs of TensorFlow 1
    for number in [number for number in range(len(results)) if number not in set(dense)]:
        with tf.control_dependencies(before):
            results[number] = _allreduce_slices(results[number], f"{name}.{number}" if name else None, request)
        before = [results[number].values]
    if dense:
        pairs = [compression.compress(as_tensor(results[number])) for number in dense]
        with tf.control_dependencies(before):
            reduced = _allreduce([small for small, _ in pairs], name, request)
        for number, output, (_, context) in zip(dense, reduced, pairs):
            results[number] = compression.decompress(output, context)
    return results


def _allreduce(tensors: Sequence[Any], name: str | None, request: _Request) -> list[Any]:
    @tf.custom_gradient  # type: ignore[untyped-decorator,unused-ignore]
    def reduce(*inputs: Any) -> Any:
        chosen = name_of("allreduce" if len(inputs) == 1 else "grouped_allreduce", name, request.ignore_name_scope)

        def on_host(*values: Any) -> list[Any]:
            return grouped_allreduce_of_arrays(values, chosen, request.op, *request.factors, request.process_set)

        def gradient(*gradients: Any) -> Any:
            _require_gradient("an allreduce", request.op)
            return _allreduce(gradients, None, request)

        return call(on_host, inputs, [each.dtype for each in inputs], [each.shape for each in inputs]), gradient

    results: list[Any] = reduce(*tensors)
    return results


def _allreduce_slices(slices: Any, name: str | None, request: _Request) -> Any:
    if request.factors != (1.0, 1.0):
        raise NotImplementedError("prescale_factor and postscale_factor are not possible with tf.IndexedSlices")
    if request.op not in (Sum, Average):
        raise NotImplementedError(f"op={request.op} is not possible with tf.IndexedSlices; use Sum or Average")
    values, indices = as_tensor(slices.values), as_tensor(slices.indices)
    if request.op == Average and values.dtype.is_integer:
        values = tf.cast(values, tf.float32 if values.dtype.size < 4 else tf.float64)
    dense_shape = None if slices.dense_shape is None else tf.convert_to_tensor(slices.dense_shape)
    inputs = [values, indices, *([] if dense_shape is None else [dense_shape])]
    chosen = name_of("sparse_allreduce", name, request.ignore_name_scope)

    def on_host(values: Any, indices: Any, *shape: Any) -> list[Any]:
        known = [int(length) for length in shape[0]] if shape else []
        merged, total = sparse_allreduce(indices, values, known, chosen, request.op, request.process_set)
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
            request = _Request(Average, 1.0, 1.0, process_set, False)
            averages = _allreduce(gradients, None, request)
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
            (average,) = _allreduce([upstream], None, _Request(Average, 1.0, 1.0, process_set, False))
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
def reducescatter(
    tensor: Any,
    device_dense: str = "",  # noqa: ARG001
    compression: Any = Compression.none,
    op: str = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """This rank's rows of the reduced tensor: as even as can be, the first ranks get one row more. Differentiable for Sum and Average."""
    return _grouped_reducescatter(
        [tensor], compression, name, _Request(op, prescale_factor, postscale_factor, process_set, ignore_name_scope)
    )[0]


@not_converted
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",  # noqa: ARG001
    compression: Any = Compression.none,
    op: str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """:func:`reducescatter` of several tensors, in one callback."""
    return _grouped_reducescatter(tensors, compression, None, _Request(op, prescale_factor, postscale_factor, process_set, False))


def _grouped_reducescatter(tensors: Sequence[Any], compression: Any, name: str | None, request: _Request) -> list[Any]:
    if not tensors:
        return []
    process_set = request.process_set

    @tf.custom_gradient  # type: ignore[untyped-decorator,unused-ignore]
    def scatter(*inputs: Any) -> Any:
        chosen = name_of("reducescatter", name, request.ignore_name_scope)

        def on_host(*values: Any) -> list[Any]:
            named = zip(values, _names(chosen, len(values)))
            return [arrays.reducescatter(each, member, request.op, *request.factors, process_set) for each, member in named]

        def gradient(*gradients: Any) -> Any:
            _require_gradient("a reducescatter", request.op)
            # Every input element went into one rank's result; of a sum, times the ranks (Horovod).
            factor = request.factors[0] * request.factors[1] * (members_of(process_set).size if request.op == Sum else 1)
            scaled = [each * tf.cast(factor, each.dtype) for each in gradients]
            return grouped_allgather(scaled, process_set=process_set)

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
