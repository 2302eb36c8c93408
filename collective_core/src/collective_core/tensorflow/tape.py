"""Gradient tapes whose gradients are those of all ranks together."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from collective_core.arrays import Average
from collective_core.runtime.process_sets import ProcessSet, global_process_set
from collective_core.tensorflow.compression import Compression
from collective_core.tensorflow.engine_calls import not_converted
from collective_core.tensorflow.gradients import GradientReducer


class _DistributedTape:
    """Beside the class of a tape, of which it changes ``gradient``."""

    _reducer: GradientReducer

    def register_local_source(self, source: Any) -> None:
        """Gradients of this variable stay this rank's own."""
        self._reducer.keep_local(source)

    @not_converted
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
        use_generic_names: bool = False,
    ) -> Any:
        """As ``tf.GradientTape.gradient``, then combined over all ranks. ``use_generic_names``: under names that no name scope changes."""
        gradients = super().gradient(target, sources, output_gradients, unconnected_gradients)  # type: ignore[misc]
        reduced = self._reducer.reduce(tf.nest.flatten(gradients), tf.nest.flatten(sources), use_generic_names)
        return tf.nest.pack_sequence_as(sources, reduced) if tf.nest.is_nested(sources) else reduced[0]


def DistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",  # noqa: ARG001
    device_sparse: str = "",  # noqa: ARG001
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: str = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """A tape with what ``gradtape`` has recorded, whose ``gradient`` is combined over all ranks, in one operation per type.

    ``groups``: a number of operations, or lists of variables that are combined together, each other one alone. ``sparse_as_dense``:
    ``tf.IndexedSlices`` are made dense first. ``scale_local_gradients``: divide the gradients of local sources by the number of ranks, so
    that they weigh as much as averages. Raises ValueError for options that make no sense together.
    """
    reducer = GradientReducer(
        *("DistributedGradientTape", compression, sparse_as_dense, op, gradient_predivide_factor, num_groups, groups, process_set),
        scale_local_gradients,
    )
    made: Any = type(type(gradtape).__name__, (_DistributedTape, type(gradtape)), {})
    tape = made.__new__(made)
    tape.__dict__.update(gradtape.__dict__)
    tape._reducer = reducer
    return tape


def PartialDistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: str = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """:func:`DistributedGradientTape`, but gradients of the layers in ``local_layers``, one or several of Keras, stay this rank's own."""
    tape = DistributedGradientTape(
        *(gradtape, device_dense, device_sparse, compression, sparse_as_dense, op, gradient_predivide_factor, num_groups, groups),
        *(process_set, scale_local_gradients),
    )
    for variable in variables_of_layers(local_layers):
        tape.register_local_source(variable)
    return tape


def variables_of_layers(layers: Any) -> list[Any]:
    """The trainable variables of a layer, or of several; none of None. Raises ValueError for what is no layer."""
    listed = [] if layers is None else list(layers) if isinstance(layers, (list, tuple, set)) else [layers]
    if not all(hasattr(layer, "trainable_weights") for layer in listed):
        raise ValueError("All local layers must be of tf.keras.layers.Layer type.")
    return [variable for layer in listed for variable in layer.trainable_weights]
