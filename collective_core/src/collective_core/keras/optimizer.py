"""DistributedOptimizer: the optimizer's own class, which averages the gradients over all ranks before it uses them; and saved models."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Mapping, Sequence

import keras

from collective_core.arrays import Average, Sum
from collective_core.errors import InvalidUseError
from collective_core.keras.requirement import framework
from collective_core.runtime.process_sets import ProcessSet, global_process_set

#: The backend's: ``Compression.none``, ``Compression.fp16`` and, where it has them, others.
Compression: Any = framework.Compression


class _Reduction:
    """Reduction of gradients, with JAX and PyTorch."""

    def __init__(self, name: str | None, compression: Any, factor: float, op: str, multiplier: int, process_set: ProcessSet) -> None:
        self._name = name
        self._compression = compression
        self._op = op
        self._factors = 1.0 / factor, factor * multiplier
        self._process_set = process_set

    def reduce(self, gradients: Sequence[Any]) -> list[Any]:
        """The gradients of all ranks together, in one group; None stays None. A rank outside the process set keeps its own."""
        if self._process_set.included() is None:
            raise InvalidUseError(f"{self._process_set} is not registered: call add_process_set() first", "invalid")
        there = [number for number, gradient in enumerate(gradients) if gradient is not None]
        reduced = list(gradients)
        if there and self._process_set.included():
            options = {"op": self._op, "process_set": self._process_set, "compression": self._compression, "name": self._name}
            factors = {"prescale_factor": self._factors[0], "postscale_factor": self._factors[1]}
            group = framework.grouped_allreduce([gradients[number] for number in there], **options, **factors)
            for number, gradient in zip(there, group):
                reduced[number] = gradient
        return reduced


class _DistributedOptimizer:
    """Beside the class of an optimizer: gradients are reduced when Keras has accumulated them, before it clips them."""

    _reduction: _Reduction

    def _clip_gradients(self, grads: Any) -> Any:
        steps = self.gradient_accumulation_steps  # type: ignore[attr-defined]
        if steps and keras.backend.backend() == "jax":  # which makes a step in every pass, and drops it in most
            is_step = (self._iterations.value + 1) % steps == 0  # type: ignore[attr-defined]
            reduced = keras.ops.cond(is_step, lambda: self._reduction.reduce(grads), lambda: list(grads))
        else:
            reduced = self._reduction.reduce(grads)
        return super()._clip_gradients(reduced)  # type: ignore[misc]


class _DistributedLossScaleOptimizer:
    """Beside LossScaleOptimizer: gradients are reduced before it looks for infinities, so that all ranks take a step or none does."""

    _reduction: _Reduction

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        return super().apply(self._reduction.reduce(grads), trainable_variables)  # type: ignore[misc]

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        return super().stateless_apply(optimizer_variables, self._reduction.reduce(grads), trainable_variables)  # type: ignore[misc]


def is_distributed(optimizer: Any) -> bool:
    """Whether :func:`DistributedOptimizer` has made it."""
    return hasattr(optimizer, "_reduction") or hasattr(optimizer, "_reducer")


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",  # noqa: ARG001
    device_sparse: str = "",  # noqa: ARG001
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: str = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """An optimizer of the same class with the same options and state, which first averages (``op``: or sums) gradients over all ranks.

    Its class has the same name, so that a saved model loads without this package, too. ``gradient_predivide_factor`` splits the division of
    an average: by the factor before the sum, by size / factor after it. ``backward_passes_per_step``: gradients of so many passes are added
    up locally before they are reduced and used; their average is used with ``average_aggregated_gradients``. ``sparse_as_dense``:
    ``tf.IndexedSlices`` are made dense first. ``groups``, ``num_groups``: with TensorFlow, gradients are reduced in so many operations
    instead of one. A rank outside ``process_set`` trains alone. ``device_dense`` and ``device_sparse`` have no effect.

    Where Keras's policy is mixed_float16 the optimizer is put into a LossScaleOptimizer first, as ``compile`` does with a plain one: ranks
    must decide together which steps are left out. Raises ValueError for what is no optimizer, and for options that make no sense together.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(f"DistributedOptimizer takes an optimizer of Keras 3, not {type(optimizer).__name__}")
    if is_distributed(optimizer):
        raise ValueError("the optimizer is a DistributedOptimizer already")
    if op not in (Average, Sum):
        raise ValueError(f"gradients are reduced with op Average or Sum, not {op!r}")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if backward_passes_per_step < 1:
        raise ValueError("backward_passes_per_step must be at least 1")
    scales_loss = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if keras.config.dtype_policy().name == "mixed_float16" and not scales_loss:
        optimizer, scales_loss = keras.optimizers.LossScaleOptimizer(optimizer, name="loss_scale_optimizer"), True
    if keras.backend.backend() == "tensorflow":
        return framework.DistributedOptimizer(
            optimizer,
            name,
            compression=compression,
            sparse_as_dense=sparse_as_dense,
            backward_passes_per_step=backward_passes_per_step,
            op=op,
            gradient_predivide_factor=gradient_predivide_factor,
            average_aggregated_gradients=average_aggregated_gradients,
            num_groups=num_groups,
            groups=groups,
            process_set=process_set,
            scale_local_gradients=scale_local_gradients,
        )
    if backward_passes_per_step > 1 and (scales_loss or optimizer.gradient_accumulation_steps):
        raise ValueError("backward_passes_per_step: with mixed_float16, or beside gradient_accumulation_steps, give that to the optimizer")
    multiplier = 1 if average_aggregated_gradients else backward_passes_per_step  # Keras averages
    reduction = _Reduction(name, compression, gradient_predivide_factor, op, multiplier, process_set)
    mixin = _DistributedLossScaleOptimizer if scales_loss else _DistributedOptimizer
    kind = type(optimizer)
    made: Any = type(kind.__name__, (mixin, kind), {"_reduction": reduction, "__module__": _module_to_load_from(kind)})
    wrapped = made.__new__(made)
    wrapped.__dict__.update(optimizer.__dict__)
    if backward_passes_per_step > 1:
        if optimizer.built:
            raise ValueError("backward_passes_per_step: the optimizer has been used already; wrap it before")
        wrapped.gradient_accumulation_steps = backward_passes_per_step
    return wrapped


def PartialDistributedOptimizer(optimizer: Any, *args: Any, local_layers: Any = None, **kwargs: Any) -> Any:
    """:func:`DistributedOptimizer`, but the gradients of ``local_layers``, a layer or several, stay this rank's own. With TensorFlow only.

    Raises ValueError with another backend, and for what is no layer.
    """
    if keras.backend.backend() != "tensorflow":
        raise ValueError(f"PartialDistributedOptimizer needs KERAS_BACKEND=tensorflow; Keras's backend is {keras.backend.backend()}")
    wrapped = DistributedOptimizer(optimizer, *args, **kwargs)
    for variable in import_module("collective_core.tensorflow.tape").variables_of_layers(local_layers):
        wrapped.register_local_var(variable)
    return wrapped


def _module_to_load_from(kind: type) -> str:
    """Where Keras finds the class of a saved optimizer: its own by the name that is the same with all backends."""
    if kind.__module__.startswith("keras."):
        for base in kind.__mro__:
            if base.__module__.startswith("keras.src.optimizers."):
                return base.__module__
    return kind.__module__


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = Compression.none,
    **options: Any,
) -> Any:
    """``keras.models.load_model``, and a DistributedOptimizer of the optimizer that the model was saved with, with its state.

    ``custom_optimizers``: classes of optimizers, ``custom_objects``: classes and functions by name, that are not Keras's own.
    ``options``: of :func:`DistributedOptimizer`.
    """
    own = {kind.__name__: kind for kind in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**own, **(custom_objects or {})})
    if model.optimizer is not None and not is_distributed(model.optimizer):
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression, **options)
    return model
