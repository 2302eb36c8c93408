"""Callbacks of ``model.fit``: the same beginning on all ranks, metrics of all ranks, learning rates that fit their number."""

from __future__ import annotations

from typing import Any, Callable, Sequence

import keras
import numpy as np

from collective_core.common.objects import allgather_object
from collective_core.keras import variables
from collective_core.keras.optimizer import is_distributed
from collective_core.runtime import membership


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Gives all ranks the root's weights and optimizer state before the first step, or after it where a rank's model is built by it.

    ``local_variables``: that stay the rank's own. ``device`` has no effect.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Sequence[Any] | None = None) -> None:  # noqa: ARG002
        super().__init__()
        self.root_rank = root_rank
        self.broadcast_done = False
        listed = [] if local_variables is None else local_variables if isinstance(local_variables, (list, tuple)) else [local_variables]
        self._local = {id(variable) for variable in listed}

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        optimizer = getattr(self.model, "optimizer", None)
        inner = getattr(optimizer, "inner_optimizer", None)
        if is_distributed(inner) and not is_distributed(optimizer):
            raise ValueError(
                "this model scales its loss around a DistributedOptimizer, so that each rank would decide by itself which steps are left "
                "out: pass hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer)) to compile"
            )
        # Together: one rank may have loaded a model that the others build in their first step.
        if not self.broadcast_done and all(allgather_object(bool(self.model.built))):
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        self._broadcast()

    def _broadcast(self) -> None:
        if self.broadcast_done:
            return
        self.broadcast_done = True
        variables.synchronize(self.model)
        optimizer = getattr(self.model, "optimizer", None)
        if optimizer is not None and not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        chosen = [variable for variable in variables.of_model(self.model) if id(variable) not in self._local]
        variables.broadcast_variables(chosen, self.root_rank)


class MetricAverageCallback(keras.callbacks.Callback):
    """Averages metrics over the ranks at the end of each epoch, for the callbacks that come after it in the list.

    A metric that not all ranks have, because only some validate, is averaged over those, and all get it. ``device`` has no effect.
    """

    def __init__(self, device: str = "") -> None:  # noqa: ARG002
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        logs = {} if logs is None else logs
        everyone = allgather_object({name: np.asarray(value, np.float64) for name, value in logs.items()})
        for name in sorted({name for metrics in everyone for name in metrics}):
            logs[name] = np.mean([metrics[name] for metrics in everyone if name in metrics], axis=0).tolist()


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Sets the learning rate to ``initial_lr * multiplier(epoch)`` from ``start_epoch`` to before ``end_epoch``.

    ``multiplier``: a function of the epoch, or a number whose power it is. With ``staircase`` it is called in each epoch, without it in
    each batch, with a fraction of an epoch; ``steps_per_epoch`` is then needed where Keras does not know it. ``momentum_correction`` has no
    effect: momentum is part of the step that Keras 3 has compiled.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,  # noqa: ARG002
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("Parameter `initial_lr` is required")
        self.initial_lr = initial_lr
        self.multiplier: Callable[[float], float] = multiplier if callable(multiplier) else lambda epoch: multiplier**epoch
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        if self.staircase or self.steps_per_epoch:
            return
        self.steps_per_epoch = self.params.get("steps")
        if not self.steps_per_epoch:
            text = f"Could not autodetect the number of steps per epoch. Please specify steps_per_epoch for {type(self).__name__}()"
            raise ValueError(text)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        if self.current_epoch < self.start_epoch or (self.end_epoch is not None and self.current_epoch >= self.end_epoch):
            return
        if self.staircase and batch == 0:
            self._set(self.current_epoch)
        elif not self.staircase:
            self._set(self.current_epoch + batch / (self.steps_per_epoch or 1))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        if logs is not None:
            logs["lr"] = self._learning_rate()

    def _set(self, epoch: float) -> None:
        variables.synchronize(self.model)
        self._optimizer().learning_rate = self.initial_lr * self.multiplier(epoch)

    def _learning_rate(self) -> float:
        variables.synchronize(self.model)
        return float(keras.ops.convert_to_numpy(self._optimizer().learning_rate))

    def _optimizer(self) -> Any:
        return getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from ``initial_lr / size`` to ``initial_lr`` in ``warmup_epochs``, as in arXiv 1706.02677."""

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            # Round numbers at the end of each epoch.
            done = epoch + 1.0 / (self.steps_per_epoch or 1)
            return (done * (membership.size() - 1) / warmup_epochs + 1) / membership.size()

        super().__init__(initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        if epoch + 1 == self.end_epoch and self.verbose > 0 and membership.rank() == 0:
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self._learning_rate():g}.")


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Keras's ModelCheckpoint of the best model, written by rank 0 alone. Needs :class:`MetricAverageCallback` before it."""

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
        filepath: str | None = None,
    ) -> None:
        path = filepath or ("best_model.weights.h5" if save_weights_only else "best_model.keras")
        options = {"save_weights_only": save_weights_only, "mode": mode, "save_freq": save_freq}
        super().__init__(path, monitor=monitor, verbose=verbose, save_best_only=True, **options)

    def _save_model(self, *args: Any, **kwargs: Any) -> None:
        if membership.rank() == 0:
            super()._save_model(*args, **kwargs)
