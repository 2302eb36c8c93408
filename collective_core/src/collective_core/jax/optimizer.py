"""Training with JAX: gradients that are averaged over the ranks, alone or as the first step of an optimizer of optax."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp

from collective_core.errors import InvalidUseError
from collective_core.jax.compression import Compression
from collective_core.jax.ops import Average, Sum, allreduce
from collective_core.runtime.process_sets import ProcessSet, global_process_set


class AccumulatedState(NamedTuple):
    """The state with ``backward_passes_per_step`` > 1: passes since the last step, the sum of their gradients, the optimizer's own."""

    passes: Any
    gradients: Any
    inner: Any


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: str = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    process_set: ProcessSet | None = None,
) -> Any:
    """An optimizer of optax (a ``GradientTransformation``) whose ``update`` first averages (``op``: or sums) gradients over all ranks.

    Its state is the optimizer's own. ``backward_passes_per_step``: gradients of so many calls of ``update`` are added up locally before
    they are reduced; in between, updates are zero. The sum is divided by their number with ``average_aggregated_gradients``.
    ``gradient_predivide_factor`` splits the division of an average: by the factor before the sum, by size / factor after it.
    A rank outside ``process_set`` trains alone.
    """
    _check_options(op, gradient_predivide_factor, backward_passes_per_step)
    if not callable(getattr(optimizer, "init", None)) or not callable(getattr(optimizer, "update", None)):
        raise ValueError(f"DistributedOptimizer takes an optimizer of optax, with init and update, not {type(optimizer).__name__}")
    try:
        from optax import GradientTransformationExtraArgs, with_extra_args_support
    except ImportError as error:
        raise ImportError("collective_core.jax.DistributedOptimizer needs optax: pip install optax") from error
    inner = with_extra_args_support(optimizer)

    def update(gradients: Any, state: Any, params: Any = None, **more: Any) -> Any:
        reduced = _reduce(gradients, name, compression, op, gradient_predivide_factor, process_set)
        return inner.update(reduced, state, params, **more)

    if backward_passes_per_step == 1:
        return GradientTransformationExtraArgs(inner.init, update)

    def begin(params: Any) -> AccumulatedState:
        return AccumulatedState(jnp.zeros((), jnp.int32), jax.tree_util.tree_map(jnp.zeros_like, params), inner.init(params))

    def accumulate(gradients: Any, state: AccumulatedState, params: Any = None, **more: Any) -> Any:
        total = jax.tree_util.tree_map(lambda one, sum_: sum_ + one, gradients, state.gradients)
        divisor = backward_passes_per_step if average_aggregated_gradients else 1

        def step() -> Any:
            updates, new = update(jax.tree_util.tree_map(lambda leaf: leaf / divisor, total), state.inner, params, **more)
            return updates, AccumulatedState(jnp.zeros_like(state.passes), jax.tree_util.tree_map(jnp.zeros_like, total), new)

        def wait() -> Any:
            return jax.tree_util.tree_map(jnp.zeros_like, total), AccumulatedState(state.passes + 1, total, state.inner)

        return jax.lax.cond(state.passes == backward_passes_per_step - 1, step, wait)

    return GradientTransformationExtraArgs(begin, accumulate)


def value_and_grad(
    fun: Callable[..., Any],
    argnums: Any = 0,
    has_aux: bool = False,
    op: str = Average,
    compression: Any = Compression.none,
    process_set: ProcessSet | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """``jax.value_and_grad`` whose gradients are averaged (``op``: or summed) over the ranks; the value is the rank's own."""
    _check_options(op)
    function = jax.value_and_grad(fun, argnums=argnums, has_aux=has_aux, **options)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        value, gradients = function(*args, **kwargs)
        return value, _reduce(gradients, None, compression, op, 1.0, process_set)

    return wrapped


def grad(
    fun: Callable[..., Any],
    argnums: Any = 0,
    has_aux: bool = False,
    op: str = Average,
    compression: Any = Compression.none,
    process_set: ProcessSet | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """``jax.grad`` whose gradients are averaged (``op``: or summed) over the ranks."""
    function = value_and_grad(fun, argnums, has_aux, op, compression, process_set, **options)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        value, gradients = function(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return wrapped


def _check_options(op: str, gradient_predivide_factor: float = 1.0, backward_passes_per_step: int = 1) -> None:
    if op not in (Average, Sum):
        raise ValueError(f"gradients are reduced with op Average or Sum, not {op!r}")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if backward_passes_per_step < 1:
        raise ValueError("backward_passes_per_step must be at least 1")


def _reduce(
    gradients: Any, name: str | None, compression: Any, op: str, gradient_predivide_factor: float, process_set: ProcessSet | None
) -> Any:
    chosen = process_set or global_process_set
    if chosen.process_set_id is None:
        raise InvalidUseError(f"{chosen} is not registered: call add_process_set() first", "invalid")
    if not chosen.included():
        return gradients
    factors = 1.0 / gradient_predivide_factor, gradient_predivide_factor
    return allreduce(gradients, name, op, *factors, chosen, compression)
