"""State that an elastic job of PyTorch carries from one set of ranks to the next."""

from __future__ import annotations

import os
from types import MappingProxyType
from typing import Any, Callable, Mapping

import torch

from collective_core.common import elastic_states
from collective_core.common.elastic_states import HostsUpdatedInterrupt as HostsUpdatedInterrupt
from collective_core.common.elastic_states import State as State
from collective_core.torch import gpu
from collective_core.torch.checkpoint import Checkpoints
from collective_core.torch.elastic.handlers import StateHandler as StateHandler  # programs import them from here, as in Horovod
from collective_core.torch.elastic.handlers import get_handler_registry as get_handler_registry
from collective_core.torch.elastic.handlers import handler_of
from collective_core.torch.elastic.handlers import set_handler_registry as set_handler_registry
from collective_core.torch.optimizer import names


def _count_optimizers() -> Callable[[], None]:
    """The function that begins makes its optimizers anew when the ranks have changed."""
    made = names.made()
    return lambda: names.forget_made_after(made)


elastic_states.before_commit.append(gpu.finish)
elastic_states.at_begin.append(_count_optimizers)
elastic_states.after_rejoin.append(gpu.forget_all)


class ObjectState(elastic_states.ObjectState):
    """Plain values as attributes: ``ObjectState(epoch=0, batch=0)``. The first two parameters are Horovod's, as those of :class:`State`."""

    def _begin_from(self, folder: str | os.PathLike[str]) -> None:
        """What ``Checkpoints.save`` was given beside its parts goes to the values of the same names, ``step`` too; others stay."""
        found = Checkpoints(folder, **self._parts()).restore()
        for name in self._names:
            if name in found:
                setattr(self, name, found[name])

    def _parts(self) -> dict[str, Any]:
        """What a checkpoint keeps by its ``state_dict``."""
        return {}


class TorchState(ObjectState):
    """Model, optimizer, samplers and plain values: ``TorchState(model, optimizer, sampler=sampler, epoch=0)``.

    Anything with ``state_dict`` and ``load_state_dict`` may be given, and what the registry of handlers knows; parts are attributes by
    their names.
    """

    _handlers: Mapping[str, StateHandler] = MappingProxyType({})

    def __init__(self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **values: Any) -> None:
        named = {"model": model, "optimizer": optimizer, **values}
        found = {name: handler_of(value) for name, value in named.items()}
        super().__init__(**{name: value for name, value in values.items() if found[name] is None})
        for name, value in named.items():
            setattr(self, name, value)
        self._handlers = {name: handler for name, handler in found.items() if handler is not None}

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._handlers:
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)

    def save(self) -> None:
        super().save()
        for handler in self._handlers.values():
            handler.save()

    def restore(self) -> None:
        super().restore()
        for handler in self._handlers.values():
            handler.restore()

    def _sync_values(self, root: int) -> None:
        for handler in self._handlers.values():
            handler.root = root
            handler.sync()
        super()._sync_values(root)

    def reset(self) -> None:
        for handler in self._handlers.values():
            handler.reset()

    def _parts(self) -> dict[str, Any]:
        return {name: handler.value for name, handler in self._handlers.items() if hasattr(handler.value, "state_dict")}
