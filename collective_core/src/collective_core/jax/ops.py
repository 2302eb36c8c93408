"""The collectives on JAX arrays: called at once or from compiled functions, and differentiable.

Every function is collective: all ranks of the process set call it, with the same types and shapes. Inside ``jit`` the shape of a result
must be known before the other ranks' are: see :func:`allgather` and :func:`alltoall`. Gradients are Horovod's: of a sum or an average the
same of the gradients; of an allgather, and of a broadcast on its root, their average; of a reducescatter all ranks' gradients, gathered.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from collective_core import arrays
from collective_core.arrays import Average, Max, Min, Product, Sum
from collective_core.common import groups
from collective_core.errors import InvalidUseError
from collective_core.jax import host_calls
from collective_core.jax.compression import Compression
from collective_core.runtime.process_sets import ProcessSet, members_of
from collective_core.runtime.reductions import Reduction, takes

__all__ = ["Average", "Max", "Min", "Product", "Sum"]

Leaves = Sequence[Any]


def _to_array(leaf: Any) -> Any:
    try:
        array = jnp.asarray(leaf)
    except (TypeError, ValueError) as error:
        raise InvalidUseError(f"{type(leaf).__name__} cannot be sent: pass arrays or numbers, or broadcast_object", "invalid") from error
    if not isinstance(array.dtype, np.dtype):
        raise InvalidUseError(f"arrays of {array.dtype} cannot be sent; of random keys pass jax.random.key_data(key)", "invalid")
    return array


def _apply(
    tree: Any, forward: Callable[[Leaves], Leaves], backward: Callable[[Leaves], Leaves], compression: Any = Compression.none
) -> Any:
    """``forward`` of the leaves of a tree, in their places. ``backward``: from the gradients of its results to those of the leaves."""
    leaves, structure = jax.tree_util.tree_flatten(tree)
    pairs = [compression.compress(_to_array(leaf)) for leaf in leaves]
    small = [leaf for leaf, _ in pairs]
    if small:
        small = list(_with_gradient(forward, backward)(*small) if host_calls.is_traced(small) else forward(small))
    restored = [compression.decompress(leaf, context) for leaf, (_, context) in zip(small, pairs)]
    return jax.tree_util.tree_unflatten(structure, restored)


def _with_gradient(forward: Callable[[Leaves], Leaves], backward: Callable[[Leaves], Leaves]) -> Callable[..., Any]:
    function: Any = jax.custom_vjp(lambda *leaves: tuple(forward(leaves)))

    def pull_back(_: None, gradients: Leaves) -> tuple[Any, ...]:
        # Those of integers are of a type without values.
        chosen = [number for number, gradient in enumerate(gradients) if gradient.dtype != jax.dtypes.float0]
        pulled = dict(zip(chosen, backward([gradients[number] for number in chosen]) if chosen else ()))
        return tuple(pulled.get(number) for number in range(len(gradients)))

    # Through itself, so that its gradients have gradients.
    function.defvjp(lambda *leaves: (function(*leaves), None), pull_back)
    differentiable: Callable[..., Any] = function
    return differentiable


def _like(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


@takes("name op prescale_factor postscale_factor process_set compression", compression=Compression.none)
def allreduce(tensor: Any, name: str | None, how: Reduction, compression: Any) -> Any:
    """Combines the arrays of all ranks element by element, in one order. ``tensor``: an array, or a tree of arrays, which go as one group.

    float16 and bfloat16 are summed in float32 and rounded once; the average of integers is rounded towards zero. ``prescale_factor``
    multiplies each input, ``postscale_factor`` the result. Differentiable for Sum and Average.
    """
    return _apply(tensor, *_allreduce_rules(name, how), compression)


#: The same: a list or another tree of arrays is reduced in one call of the host, in which small arrays travel together.
grouped_allreduce = allreduce


def _allreduce_rules(name: str | None, how: Reduction) -> tuple[Callable[[Leaves], Leaves], Callable[[Leaves], Leaves]]:
    members_of(how.process_set)

    def on_host(sources: Any, targets: Any) -> None:
        # In memory of the engine, also one array alone: other ranks would write to new pages of the target, which takes longest.
        for target, reduced in zip(targets, groups.grouped_allreduce(sources, name, *how)):
            target[...] = reduced

    def forward(leaves: Leaves) -> Leaves:
        return host_calls.call(on_host, leaves, [_like(leaf) for leaf in leaves], is_elementwise=True)

    def backward(gradients: Leaves) -> Leaves:
        how.require_gradient("a reduction")
        reduced: Leaves = allreduce(list(gradients), None, *how)
        return reduced

    return forward, backward


def broadcast(tensor: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet | None = None) -> Any:
    """The root's array, or tree of arrays, on every rank; all ranks pass the same types and shapes. The root is a rank of the job."""
    members = members_of(process_set)

    def on_host(sources: Any, targets: Any) -> None:
        for number, (source, target) in enumerate(zip(sources, targets)):
            arrays.broadcast(source, root_rank, _numbered(name, number, len(sources)), process_set, target)

    def forward(leaves: Leaves) -> Leaves:
        return host_calls.call(on_host, leaves, [_like(leaf) for leaf in leaves], is_elementwise=True)

    def backward(gradients: Leaves) -> Leaves:
        averaged = allreduce(list(gradients), process_set=process_set)
        return averaged if members.ranks[members.rank] == root_rank else [jnp.zeros_like(gradient) for gradient in averaged]

    return _apply(tensor, forward, backward)


def _numbered(name: str | None, number: int, count: int) -> str | None:
    return f"{name}.{number}" if name and count > 1 else name


def _make_rows(make: Callable[[Any], tuple[np.ndarray[Any, Any], list[int]]], array: Any, rows: list[int], problem: str) -> Any:
    """The array that ``make`` returns, with the rows of each part of it, for this one on the host.

    ``rows``: as many as it must have in a compiled function, where that must be known before. ``problem``: why it cannot be compiled, which
    ends it, as all ranks compile the same. Elsewhere ``make`` tells the other ranks.
    """
    if not host_calls.is_traced([array]):
        host_calls.wait()
        return host_calls.to_device(make(np.asarray(array))[0], [array])
    if problem:
        raise InvalidUseError(problem, "invalid")

    def on_host(sources: Any, targets: Any) -> None:
        made, received = make(sources[0])
        if received != rows:
            raise InvalidUseError(
                f"{received} rows came from the ranks where this compiled function has {rows}: inside jit all ranks must give as many rows "
                "(after a change of the ranks, call jax.clear_caches())",
                "invalid",
            )
        targets[0][...] = made

    return host_calls.call(on_host, [array], [jax.ShapeDtypeStruct((sum(rows), *array.shape[1:]), array.dtype)])[0]


def _for_each(tensor: Any, name: str | None, apply: Callable[[Any, str | None], Any]) -> Any:
    leaves, structure = jax.tree_util.tree_flatten(tensor)
    made = [apply(_to_array(leaf), _numbered(name, number, len(leaves))) for number, leaf in enumerate(leaves)]
    return jax.tree_util.tree_unflatten(structure, made)


def allgather(tensor: Any, name: str | None = None, process_set: ProcessSet | None = None) -> Any:
    """All ranks' arrays one after the other along the first dimension. Also of a tree of arrays.

    Ranks may give different numbers of rows, but not inside ``jit``, where that is an error on every rank.
    """
    return _for_each(tensor, name, lambda array, own_name: _allgather(array, own_name, process_set))


def _allgather(array: Any, name: str | None, process_set: ProcessSet | None, rows_of_ranks: list[int] | None = None) -> Any:
    """``rows_of_ranks``: where they are known to differ."""
    members = members_of(process_set)
    problem = arrays.unsupported_rows(array.shape, "allgather")
    mine = array.shape[0] if array.ndim else 0

    def forward(leaves: Leaves) -> Leaves:
        rows = rows_of_ranks or [mine] * members.size
        return [_make_rows(lambda source: arrays.allgather_with_rows(source, name, process_set), leaves[0], rows, problem)]

    def backward(gradients: Leaves) -> Leaves:
        (averaged,) = allreduce(list(gradients), process_set=process_set)
        before = sum((rows_of_ranks or [mine] * members.size)[: members.rank])
        if not host_calls.is_traced([averaged]):
            before = int(arrays.allgather(np.array([mine]), process_set=process_set)[: members.rank].sum())
        return [averaged[before : before + mine]]

    return _apply(array, forward, backward)


@takes("name op prescale_factor postscale_factor process_set compression", compression=Compression.none)
def reducescatter(tensor: Any, name: str | None, how: Reduction, compression: Any) -> Any:
    """This rank's rows of what :func:`allreduce` would give: as even as can be, the first ranks get one more. Also of a tree of arrays."""
    return _for_each(tensor, name, lambda array, own_name: _reducescatter(array, own_name, how, compression))


def _reducescatter(array: Any, name: str | None, how: Reduction, compression: Any) -> Any:
    members = members_of(how.process_set)
    problem = arrays.unsupported_rows(array.shape, "reducescatter")
    rows = [arrays.scattered_rows(array.shape[0] if array.ndim else 0, rank, members.size) for rank in range(members.size)]

    def forward(leaves: Leaves) -> Leaves:
        own = [rows[members.rank]]
        return [_make_rows(lambda source: (arrays.reducescatter(source, name, *how), own), leaves[0], own, problem)]

    def backward(gradients: Leaves) -> Leaves:
        how.require_gradient("a reduction")
        factor = how.prescale * how.postscale * (members.size if how.op == Sum else 1)
        scaled = gradients[0] if factor == 1 else gradients[0] * factor
        return [_allgather(scaled, None, how.process_set, rows)]

    return _apply(array, forward, backward, compression)


def alltoall(tensor: Any, splits: Sequence[int] | None = None, name: str | None = None, process_set: ProcessSet | None = None) -> Any:
    """Sends ``splits[r]`` rows to every rank r; returns what came, in rank order.

    With ``splits``, returns a pair: the array, and the rows from each rank as an array of int32; not inside ``jit``, where the array's
    shape would be known too late. Without, every rank is sent the same number of rows.
    """
    array = _to_array(tensor)
    members = members_of(process_set)
    chosen, problem = arrays.choose_splits(array.shape, splits, members)
    if splits is not None:
        problem = "alltoall with splits cannot be compiled: how many rows come is known only when it runs"
    received_rows: list[int] = []

    def forward(leaves: Leaves) -> Leaves:
        def make(source: Any) -> Any:
            received, received_rows[:] = arrays.alltoall(source, splits, name, process_set)
            return received, list(received_rows)

        return [_make_rows(make, leaves[0], chosen, problem)]

    def backward(gradients: Leaves) -> Leaves:
        back = None if splits is None else list(received_rows)
        returned = alltoall(gradients[0], back, None, process_set)
        return [returned if back is None else returned[0]]

    received = _apply(array, forward, backward)
    if splits is None:
        return received
    return received, jnp.array(received_rows or chosen, jnp.int32)


def barrier(name: str | None = None, process_set: ProcessSet | None = None) -> None:
    """Returns when every rank of the process set has called it. Not to be compiled: it is called when a function is traced."""
    host_calls.wait()
    arrays.barrier(name, process_set)


def join(process_set: ProcessSet | None = None) -> int:
    """For a rank without further data: takes part in what the others still do, until all have joined. Not to be compiled.

    It adds nothing to sums, an average divides by the ranks that have not joined, and it contributes no rows. Returns the
    rank (of the job) that joined last.
    """
    host_calls.wait()
    return arrays.join(process_set)
