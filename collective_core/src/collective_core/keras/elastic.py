"""Elastic jobs with Keras: ranks come and go, and what was committed is not lost.

state = hvd.elastic.KerasState(model, batch=0, epoch=0)

@hvd.elastic.run
def train(state):
    model.fit(
        data,
        epochs=epochs - state.epoch,
        callbacks=[
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.CommitStateCallback(state, batches_per_commit=100),
        ],
    )

train(state)
"""

from __future__ import annotations

from typing import Any

import keras

from collective_core import arrays
from collective_core.common.elastic_states import HostsUpdatedInterrupt, ObjectState, State, run
from collective_core.keras import variables

__all__ = [
    "CommitStateCallback",
    "HostsUpdatedInterrupt",
    "KerasState",
    "ObjectState",
    "State",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


class KerasState(ObjectState):
    """A model, its optimizer and plain values: ``KerasState(model, batch=0, epoch=0)``.

    ``optimizer``: default the one that the model was compiled with. Raises ValueError for a model that was not built.
    """

    def __init__(self, model: Any, optimizer: Any = None, **values: Any) -> None:
        if not model.built:
            raise ValueError("Model must be built first. Run `model.build(input_shape)`.")
        self.model = model
        self.optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        if self.optimizer is not None and not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)
        super().__init__(**values)
        self._keep()

    def _variables(self) -> list[Any]:
        return variables.of_model(self.model, self.optimizer)

    def _keep(self) -> None:
        variables.synchronize(self.model)
        self._kept = variables.read(self._variables())

    def save(self) -> None:
        super().save()
        self._keep()

    def restore(self) -> None:
        super().restore()
        variables.write(self._variables(), self._kept)

    def _sync_values(self, root: int) -> None:
        super()._sync_values(root)
        self._keep()
        for number, value in enumerate(self._kept):
            arrays.broadcast(value, root, f"elastic.variable.{number}", out=value)
        variables.write(self._variables(), self._kept)


class CommitStateCallback(keras.callbacks.Callback):
    """Commits the state at the end of every ``batches_per_commit`` batches and of every epoch. Put it last."""

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        self.batches_remaining = self.batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.state.commit()
            self.batches_remaining = self.batches_per_commit

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):
    """Callback that keeps ``state.batch`` at the batch that was trained last, 0 at the end of an epoch."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        self.state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Callback that keeps ``state.epoch`` at the number of epochs done, over all calls of ``fit``, each of which counts from 0."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.initial_epoch = state.epoch

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        self.state.epoch = self.initial_epoch + epoch + 1
