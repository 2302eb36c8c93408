"""Handlers of the parts of a TorchState: one for each kind of part, in Horovod's registry, to which a program may add its own."""

from __future__ import annotations

import copy
from typing import Any

import torch

from collective_core.torch.elastic.sampler import ElasticSampler
from collective_core.torch.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters, load_in_place
from collective_core.torch.sharded import is_shard


class StateHandler:
    """Keeper of ``value``: ``save`` and ``restore`` in this rank's memory; ``sync`` brings it to all ranks, and saves it.

    ``root`` is the rank to take it from, the one with the newest commit, which a handler that was written for Horovod takes to be 0.
    """

    root = 0

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        raise NotImplementedError

    def restore(self) -> None:
        raise NotImplementedError

    def sync(self) -> None:
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """The program has put another object in its place."""
        self.value = value
        self.save()

    def reset(self) -> None:
        """The ranks have changed."""


class PartHandler(StateHandler):
    """For what has ``state_dict`` and ``load_state_dict``, and may have ``elastic_saved`` (called after a ``save``), ``elastic_sync(root)``
    (instead of a broadcast of its state) and ``elastic_reset``."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())
        _call(self.value, "elastic_saved")

    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        if not _call(self.value, "elastic_sync", self.root):
            self.value.load_state_dict(broadcast_object(self.value.state_dict(), self.root, f"elastic.part.{type(self.value).__name__}"))
        self.save()

    def reset(self) -> None:
        _call(self.value, "elastic_reset")


def _call(value: Any, method: str, *arguments: Any) -> bool:
    """Calls a method that a part need not have. Whether it has."""
    if not hasattr(value, method):
        return False
    getattr(value, method)(*arguments)
    return True


class ModelStateHandler(PartHandler):
    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), self.root)
        self.save()


class OptimizerStateHandler(PartHandler):
    def restore(self) -> None:
        load_in_place(self.value, copy.deepcopy(self._saved))

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, self.root)
        self.save()

    def reset(self) -> None:
        self.value.zero_grad(set_to_none=True)  # of a step that was cut off


class SamplerStateHandler(PartHandler):
    def reset(self) -> None:
        self.value.reset()


_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Types, and the handlers that keep values of them; the first that fits counts."""
    return _registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """For states that are made after it."""
    global _registry
    _registry = registry


def handler_of(value: Any) -> StateHandler | None:
    """A handler for the value; None for a plain one. Raises ValueError for sharded tables, whose rows are lost with their rank."""
    if isinstance(value, torch.nn.Module) and any(map(is_shard, value.parameters())):
        raise ValueError(
            "sharded tables are no part of a TorchState, because their rows are lost with a rank: make them in the elastic function, and "
            "restore them there with hvd.Checkpoints"
        )
    for kind, handler in _registry:
        if isinstance(value, kind):
            return handler(value)
    return PartHandler(value) if hasattr(value, "state_dict") and hasattr(value, "load_state_dict") else None
