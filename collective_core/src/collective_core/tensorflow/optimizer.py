"""Optimizers that apply the gradients of all ranks: around one of Keras or of TensorFlow 1."""

from __future__ import annotations

from typing import Any, Sequence

import tensorflow as tf

from collective_core.arrays import Average
from collective_core.runtime.process_sets import ProcessSet, global_process_set
from collective_core.tensorflow.compression import Compression
from collective_core.tensorflow.engine_calls import not_converted
from collective_core.tensorflow.gradients import GradientReducer, LocalAggregation
from collective_core.tensorflow.tape import variables_of_layers


class _DistributedOptimizer(tf.compat.v1.train.Optimizer):
    """Around an optimizer of TensorFlow 1."""

    def __init__(
        self, optimizer: Any, name: str | None, use_locking: bool, reducer: GradientReducer, aggregation: LocalAggregation | None
    ) -> None:
        super().__init__(name=name or f"Distributed{type(optimizer).__name__}", use_locking=use_locking)
        self._optimizer = optimizer
        self._reducer = reducer
        self._aggregation = aggregation

    def register_local_var(self, var: Any) -> None:
        """Gradients of this variable stay this rank's own."""
        self._reducer.keep_local(var)

    @not_converted
    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """As the optimizer's, then combined over all ranks."""
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        if not pairs:
            return []
        gradients, variables = zip(*pairs)
        combine = self._reducer.reduce if self._aggregation is None else self._aggregation.add
        return list(zip(combine(gradients, variables), variables))

    @not_converted
    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        """As the optimizer's; with several backward passes per step only after the last of them."""
        pairs = list(grads_and_vars)
        if self._aggregation is None:
            return self._optimizer.apply_gradients(pairs, global_step=global_step, name=name)

        def skip() -> Any:
            return tf.no_op() if global_step is None else tf.group(tf.compat.v1.assign_add(global_step, 1))

        update = self._aggregation.apply(
            [gradient for gradient, _ in pairs],
            lambda: self._optimizer.apply_gradients(pairs, global_step=global_step, name=name),
            skip,
        )
        return update if tf.executing_eagerly() else tf.group(update)

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.variables(*args, **kwargs)


class _DistributedKerasOptimizer:
    """Beside the class of an optimizer of Keras 3, of which it changes ``apply``: ``apply_gradients`` and ``minimize`` go through it."""

    _reducer: GradientReducer
    _aggregation: LocalAggregation | None

    def register_local_var(self, var: Any) -> None:
        """Gradients of this variable stay this rank's own."""
        self._reducer.keep_local(var)

    @not_converted
    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)  # type: ignore[attr-defined]
        gradients = list(grads)
        if self._aggregation is None:
            super().apply(self._reducer.reduce(gradients, variables), variables)  # type: ignore[misc]
            return
        if not self.built:  # type: ignore[attr-defined]
            with tf.init_scope():
                self.build(variables)  # type: ignore[attr-defined]
        combined = self._aggregation.add(gradients, variables)
        self._aggregation.apply(
            combined,
            lambda: super(_DistributedKerasOptimizer, self).apply(combined, variables),  # type: ignore[misc]
            lambda: self.iterations.assign_add(1),  # type: ignore[attr-defined]
        )


def _around_keras(optimizer: Any, name: str | None, reducer: GradientReducer, aggregation: LocalAggregation | None) -> Any:
    """An optimizer of the same class with the same options and state, which it shares with the given one.

    Its class has the same name, so that a saved model loads without this package.
    """
    # Keras registers what is not its own under another name.
    made: Any = type(type(optimizer).__name__, (_DistributedKerasOptimizer, type(optimizer)), {"__module__": type(optimizer).__module__})
    # Not from its configuration, which the program's own classes, of a schedule of the learning rate for example, need not have.
    wrapped = made.__new__(made)
    wrapped.__dict__.update(optimizer.__dict__)
    wrapped._reducer, wrapped._aggregation = reducer, aggregation
    if name:
        wrapped.name = name
    return wrapped


def _is_of_keras(optimizer: Any) -> bool:
    # Those of Keras 2 have no `apply`, through which all updates of Keras 3 go: around them nothing would be reduced.
    return all(hasattr(optimizer, name) for name in ("get_config", "apply", "iterations"))


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",  # noqa: ARG001
    device_sparse: str = "",  # noqa: ARG001
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: str = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """An optimizer like the given one, of Keras 3 or ``tf.compat.v1.train``, that applies gradients combined over all ranks.

    ``backward_passes_per_step``: gradients of so many calls are added up, or averaged with ``average_aggregated_gradients``, before they
    are combined and applied. The other parameters are those of ``DistributedGradientTape``; with that tape use the plain optimizer. Raises
    ValueError for another kind of optimizer, and for options that make no sense together.
    """
    if backward_passes_per_step < 1:
        raise ValueError("backward_passes_per_step must be > 0")
    is_of_tensorflow_1 = isinstance(optimizer, tf.compat.v1.train.Optimizer)
    if not is_of_tensorflow_1 and not _is_of_keras(optimizer):
        expected = "expected one of Keras 3 or tf.compat.v1.train; with Keras 2 (TF_USE_LEGACY_KERAS=1) use hvd.DistributedGradientTape"
        raise ValueError(f"invalid optimizer {optimizer!r}: {expected}")
    if is_of_tensorflow_1 and backward_passes_per_step > 1 and tf.executing_eagerly():
        raise ValueError("backward_passes_per_step > 1 is not supported with an optimizer of TensorFlow 1 in eager execution; use Keras's")
    prefix = name or f"Distributed{type(optimizer).__name__}"
    reducer = GradientReducer(
        *(prefix, compression, sparse_as_dense, op, gradient_predivide_factor, num_groups, groups, process_set, scale_local_gradients)
    )
    aggregation = None
    if backward_passes_per_step > 1:
        aggregation = LocalAggregation(backward_passes_per_step, average_aggregated_gradients, reducer)
    if is_of_tensorflow_1:
        return _DistributedOptimizer(optimizer, name, use_locking, reducer, aggregation)
    return _around_keras(optimizer, name, reducer, aggregation)


def PartialDistributedOptimizer(optimizer: Any, *args: Any, local_layers: Any = None, **kwargs: Any) -> Any:
    """:func:`DistributedOptimizer`, but the gradients of the layers in ``local_layers``, one or several of Keras, stay this rank's own."""
    wrapped = DistributedOptimizer(optimizer, *args, **kwargs)
    for variable in variables_of_layers(local_layers):
        wrapped.register_local_var(variable)
    return wrapped
