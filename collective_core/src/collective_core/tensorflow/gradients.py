"""Gradients of the tape and the optimizers: reduce them together, and add them up over several backward passes."""

from __future__ import annotations

import warnings
from typing import Any, Callable, Sequence

import tensorflow as tf

from collective_core.arrays import Average
from collective_core.runtime import launchers
from collective_core.runtime.process_sets import ProcessSet, members_of
from collective_core.tensorflow.mpi_ops import grouped_allreduce


def identity_of(variable: Any) -> int:
    """What a variable is known by, whether the program has it from TensorFlow or from Keras."""
    inner = getattr(variable, "value", None)
    return id(variable if inner is None or callable(inner) else inner)


class GradientReducer:
    """Combines gradients of all ranks. The parameters are those of ``DistributedGradientTape`` and ``DistributedOptimizer``.

    Raises ValueError for options that make no sense together.
    """

    def __init__(
        self,
        name: str,
        compression: Any,
        sparse_as_dense: bool,
        op: str,
        gradient_predivide_factor: float,
        num_groups: int,
        groups: Any,
        process_set: ProcessSet,
        scale_local_gradients: bool,
    ) -> None:
        if gradient_predivide_factor != 1.0 and op != Average:
            raise ValueError("gradient_predivide_factor not supported with op != Average")
        if num_groups:
            warnings.warn("num_groups is deprecated; use groups", DeprecationWarning, stacklevel=3)
            groups = num_groups if groups is None else groups
        if groups is not None and not (isinstance(groups, list) or (isinstance(groups, int) and groups > 0)):
            raise ValueError("groups should be a positive integer or a list of list of tf.Variable.")
        self._name = name
        self._compression = compression
        self._sparse_as_dense = sparse_as_dense
        self._op = op
        self._factors = 1.0 / gradient_predivide_factor, gradient_predivide_factor
        self._groups = groups
        self._process_set = process_set
        self._scales_local = scale_local_gradients
        self._local: dict[int, Any] = {}  # the variables themselves, so that no other gets the same identity

    def keep_local(self, variable: Any) -> None:
        """Gradients of this variable stay this rank's own."""
        self._local[identity_of(variable)] = variable

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any], use_generic_names: bool = False) -> list[Any]:
        """The gradients as the ranks have them together; None stays None."""
        results = [self._dense(gradient) for gradient in gradients]
        if self._process_set.included() is False or (members_of(self._process_set).size == 1 and not launchers.is_elastic()):
            return results
        shared = [n for n, (g, v) in enumerate(zip(results, variables)) if g is not None and identity_of(v) not in self._local]
        if self._scales_local:
            size = members_of(self._process_set).size
            for number in [n for n, (g, v) in enumerate(zip(results, variables)) if g is not None and identity_of(v) in self._local]:
                results[number] = _scaled(results[number], 1.0 / size)
        with tf.name_scope(f"{self._name}_Allreduce"):
            reduced: list[Any] = []
            for place, numbers in enumerate(self._grouped(shared, variables)):
                # One after the other in graphs of TensorFlow 1, too: they would take its threads in another order on each rank.
                with tf.control_dependencies(reduced):
                    reduced = grouped_allreduce(
                        [results[number] for number in numbers],
                        compression=self._compression,
                        op=self._op,
                        prescale_factor=self._factors[0],
                        postscale_factor=self._factors[1],
                        process_set=self._process_set,
                        name=f"{self._name}.gradients.{place}" if use_generic_names else None,
                        ignore_name_scope=use_generic_names,
                    )
                for number, gradient in zip(numbers, reduced):
                    results[number] = gradient
        return results

    def _dense(self, gradient: Any) -> Any:
        return tf.convert_to_tensor(gradient) if self._sparse_as_dense and isinstance(gradient, tf.IndexedSlices) else gradient

    def _grouped(self, shared: list[int], variables: Sequence[Any]) -> list[list[int]]:
        """The numbers of the gradients by group; without ``groups`` all are one."""
        if self._groups is None or not shared:
            return [shared] if shared else []
        if isinstance(self._groups, int):
            count = min(self._groups, len(shared))
            return [shared[len(shared) * part // count : len(shared) * (part + 1) // count] for part in range(count)]
        places = {identity_of(variable): place for place, group in enumerate(self._groups) for variable in group}
        grouped: dict[Any, list[int]] = {}
        for number in shared:
            grouped.setdefault(places.get(identity_of(variables[number]), f"alone {number}"), []).append(number)
        return list(grouped.values())


def _scaled(gradient: Any, factor: float) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * tf.cast(factor, gradient.values.dtype), gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)


class LocalAggregation:
    """Adds gradients up over ``passes`` backward passes and reduces their sum, or their average, in the last of them.

    ``steps`` counts the passes since then: what the program updates changes only where it is 0. In graphs of TensorFlow 1 its variables are
    local ones, which ``tf.compat.v1.local_variables_initializer`` initialises, and ``MonitoredTrainingSession``, too.
    """

    def __init__(self, passes: int, takes_average: bool, reducer: GradientReducer) -> None:
        self._passes = passes
        self._divisor = passes if takes_average else 1
        self._reducer = reducer
        self._sums: list[Any] = []  # None where there is no gradient
        self.steps: Any = None

    def _require_same_pattern(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Raises ValueError where other variables have a gradient than in the first pass, which has no sum for them."""
        if len(gradients) != len(self._sums):
            raise ValueError(f"backward_passes_per_step > 1: {len(gradients)} gradients, and in the first pass {len(self._sums)}")
        for gradient, total, variable in zip(gradients, self._sums, variables):
            if (gradient is None) != (total is None):
                text = (
                    "has no gradient, and had one in the first pass"
                    if gradient is None
                    else "has a gradient, and had none in the first pass"
                )
                name = getattr(variable, "path", None) or getattr(variable, "name", None)
                raise ValueError(f"backward_passes_per_step > 1: variable {name!r} {text}; every pass must have the same gradients")

    def _make_variables(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        if self.steps is not None:
            self._require_same_pattern(gradients, variables)
            return
        with tf.init_scope():
            local = [tf.compat.v1.GraphKeys.LOCAL_VARIABLES]
            graph_options = {} if tf.executing_eagerly() else {"collections": local, "use_resource": True}
            make = tf.Variable if tf.executing_eagerly() else tf.compat.v1.Variable
            self.steps = make(0, trainable=False, dtype=tf.int64, **graph_options)
            for gradient in gradients:
                zeros = None if gradient is None else tf.zeros(gradient.shape, gradient.dtype)
                self._sums.append(None if zeros is None else make(zeros, trainable=False, **graph_options))

    def add(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Adds these; returns the reduced gradients in the last pass, otherwise the sums so far, which are not to be applied.

        Raises ValueError where other variables have a gradient than in the first pass.
        """
        if any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients) and not self._reducer._sparse_as_dense:
            raise ValueError("IndexedSlices are not supported when backward_passes_per_step > 1 and sparse_as_dense is False")
        gradients = [self._reducer._dense(gradient) for gradient in gradients]
        self._make_variables(gradients, variables)
        there = [number for number, total in enumerate(self._sums) if total is not None]
        added = [self._sums[number].assign_add(gradients[number]) for number in there]
        with tf.control_dependencies(added):
            counted = self.steps.assign_add(1)
        with tf.control_dependencies([counted]):
            sums = [self._sums[number].read_value() for number in there]

            def finish() -> list[Any]:
                reduced = self._reducer.reduce(sums, [variables[number] for number in there])
                with tf.control_dependencies(reduced):
                    cleared = [self._sums[number].assign(tf.zeros_like(self._sums[number])) for number in there]
                    with tf.control_dependencies([*cleared, self.steps.assign(0)]):
                        return [tf.divide(each, tf.cast(self._divisor, each.dtype)) for each in reduced]

            # A rank's own steps say when: all ranks have made as many.
            chosen = tf.cond(tf.equal(counted, self._passes), finish, lambda: [tf.identity(each) for each in sums])
        results: list[Any] = [None] * len(gradients)
        for number, gradient in zip(there, chosen if isinstance(chosen, (list, tuple)) else [chosen]):
            results[number] = gradient
        return results

    def apply(self, gradients: Sequence[Any], update: Callable[[], Any], skip: Callable[[], Any]) -> Any:
        """Runs ``update`` after the last pass, ``skip`` after another, which return operations or nothing."""

        def run(function: Callable[[], Any]) -> Any:
            done = function()
            with tf.control_dependencies([done] if isinstance(done, tf.Operation) or tf.is_tensor(done) else []):
                return tf.constant(True)

        with tf.control_dependencies([gradient for gradient in gradients if gradient is not None]):
            return tf.cond(tf.equal(self.steps.read_value(), 0), lambda: run(update), lambda: run(skip))
