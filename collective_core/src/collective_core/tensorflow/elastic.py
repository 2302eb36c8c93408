"""Elastic jobs with Horovod's interface: ranks come and go, and what was committed is not lost.

    hvd.init()

    @hvd.elastic.run
    def train(state):
        for state.batch in range(state.batch, batches):
            step(...)
            state.commit()

    train(hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0))

Started by ``collective_core.launch --min-np 2 …`` or ``Runner(min_np=2, …)``; under other launchers it runs with the ranks that are there.
"""

from __future__ import annotations

from typing import Any, Iterable

import numpy as np
import tensorflow as tf

from collective_core import arrays
from collective_core.common.elastic_states import HostsUpdatedInterrupt, ObjectState, State, run

__all__ = ["HostsUpdatedInterrupt", "ObjectState", "State", "TensorFlowKerasState", "TensorFlowState", "run"]


class TensorFlowState(ObjectState):
    """Variables and plain values: ``TensorFlowState(variables, batch=0)``.

    ``variables``: default in a graph of TensorFlow 1 its global ones. ``session``: for such a graph, default the one that is entered.
    """

    def __init__(self, variables: Iterable[Any] | None = None, session: Any = None, **values: Any) -> None:
        self._session = session
        self._variables = list(tf.compat.v1.global_variables() if variables is None else variables)
        self._assignments: list[tuple[Any, Any]] = []
        if not tf.executing_eagerly():
            self._session = session or tf.compat.v1.get_default_session()
            if self._session is None:
                raise ValueError("a TensorFlowState of a graph needs a session: pass it, or enter one")
            for variable in self._variables:
                value = tf.compat.v1.placeholder(variable.dtype.base_dtype, variable.shape)
                self._assignments.append((value, tf.compat.v1.assign(variable, value)))
        super().__init__(**values)
        self._keep()

    def _tracked(self) -> list[Any]:
        """The variables, of TensorFlow or Keras."""
        return self._variables

    def _keep(self) -> None:
        self._kept = self._read()

    def _read(self) -> list[Any]:
        if self._session is not None:
            read: list[Any] = self._session.run(self._variables)
            return read
        return [np.array(variable) for variable in self._tracked()]

    def _write(self, values: list[Any]) -> None:
        if self._session is not None:
            feed = {place: value for (place, _), value in zip(self._assignments, values)}
            self._session.run([assignment for _, assignment in self._assignments], feed)
            return
        for variable, value in zip(self._tracked(), values):
            variable.assign(value)

    def save(self) -> None:
        super().save()
        self._keep()

    def restore(self) -> None:
        super().restore()
        self._write(self._kept)

    def _sync_values(self, root: int) -> None:
        super()._sync_values(root)
        mine = self._read()
        self._kept = [arrays.broadcast(value, root, f"elastic.variable.{number}") for number, value in enumerate(mine)]
        self._write(self._kept)


class TensorFlowKerasState(TensorFlowState):
    """A model of Keras, its optimizer and plain values: ``TensorFlowKerasState(model, optimizer, batch=0)``.

    ``optimizer``: default the one that the model was compiled with. ``backend``: Horovod's; not used. Raises ValueError for a model that
    was not built, whose variables do not exist yet, and for an optimizer of Keras 2.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **values: Any) -> None:  # noqa: ARG002
        if not getattr(model, "built", True):
            raise ValueError("Model must be built first. Run `model.build(input_shape)`.")
        self.model = model
        self.optimizer = optimizer or getattr(model, "optimizer", None)
        if self.optimizer is not None and not hasattr(self.optimizer, "built"):
            instead = "TensorFlowState([*model.variables, *optimizer.variables()])"
            expected = f"expected one of Keras 3; with Keras 2 (TF_USE_LEGACY_KERAS=1) use {instead}"
            raise ValueError(f"invalid optimizer {self.optimizer!r}: {expected}")
        if self.optimizer is not None and not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)
        super().__init__([], **values)

    def _tracked(self) -> list[Any]:
        return [*self.model.variables, *([] if self.optimizer is None else self.optimizer.variables)]
