"""What an elastic job carries from one set of ranks to the next: saved by every rank in its memory, brought to all from the newest."""

from __future__ import annotations

import copy
import os
from types import MappingProxyType
from typing import Any, Callable, Mapping, Sequence

import torch

from collective_core.elastic import worker
from collective_core.errors import CollectiveError
from collective_core.runtime import membership
from collective_core.torch import handles, nccl_watchdog
from collective_core.torch.checkpoint import Checkpoints
from collective_core.torch.elastic.handlers import StateHandler as StateHandler  # programs import them from here, as in Horovod
from collective_core.torch.elastic.handlers import get_handler_registry as get_handler_registry
from collective_core.torch.elastic.handlers import handler_of
from collective_core.torch.elastic.handlers import set_handler_registry as set_handler_registry
from collective_core.torch.functions import allgather_object, broadcast_object
from collective_core.torch.ops import allreduce


class HostsUpdatedInterrupt(RuntimeError):
    """Raised by ``commit`` and ``check_host_updates`` when ranks are to be added or to leave; ``elastic.run`` catches it.

    ``skip_sync`` is Horovod's; the state is always brought to all ranks here.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the ranks of the job are to change")
        self.skip_sync = skip_sync


class State:
    """The interface: ``save`` and ``restore`` work in this rank's memory, ``sync`` brings the newest rank's to all.

    ``bcast_object`` and ``get_rank`` are Horovod's; the engine's own are used here.
    """

    def __init__(self, bcast_object: Any = None, get_rank: Any = None) -> None:  # noqa: ARG002
        self._commits = 0  # like all names but Horovod's: the program's values may have any other
        self._callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Has these called whenever the ranks have changed, before the function goes on: to set the learning rate anew, for example."""
        self._callbacks += callbacks

    def on_reset(self) -> None:
        """The ranks have changed."""
        for callback in self._callbacks:
            callback()
        self.reset()

    def commit(self) -> None:
        """Saves the state, and lets the ranks change where they are to. Collective. Not in every step, if it takes long.

        Operations that are under way are waited for, and when one has failed, nothing is saved and its error is raised: on a GPU an
        operation counts as done when it has begun, and what a failure leaves of it must not become the state.
        """
        handles.finish()
        nccl_watchdog.finish()
        failure = membership.failure()
        if failure is not None:
            raise failure
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raises :class:`HostsUpdatedInterrupt` on all ranks when ranks are to be added or to leave. Collective."""
        if not worker.is_one():
            return
        flag = torch.tensor([1 if worker.shall_change() else 0], dtype=torch.int32)
        if int(allreduce.allreduce_(flag, name="elastic.change", op=allreduce.Max)):
            raise HostsUpdatedInterrupt

    def _newest(self) -> tuple[int, int]:
        """The rank with the most commits, and their number: a failure may have let one commit and another not. Collective."""
        commits = allgather_object(self._commits, "elastic.commits")
        return commits.index(max(commits)), max(commits)

    def save(self) -> None:
        """Keeps the state as it is now, in memory."""
        self._commits += 1

    def restore(self) -> None:
        """Sets the state back to the last ``save``."""
        raise NotImplementedError

    def sync(self) -> None:
        """Brings all ranks to the state of the newest, and saves it."""
        raise NotImplementedError

    def reset(self) -> None:
        """Does what the state's parts need when the ranks have changed."""

    def _begin_from(self, folder: str | os.PathLike[str]) -> None:
        """Takes the state from the last valid checkpoint there (``--restart-from``). Collective."""
        text = f"--restart-from {folder}: a {type(self).__name__} cannot begin from a checkpoint; use TorchState or ObjectState"
        raise CollectiveError(text, "invalid")


class ObjectState(State):
    """Plain values as attributes: ``ObjectState(epoch=0, batch=0)``. The first two parameters are Horovod's, as those of :class:`State`."""

    def __init__(self, bcast_object: Any = None, get_rank: Any = None, **values: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._names = list(values)
        self._saved: dict[str, Any] = copy.deepcopy(values)
        for name, value in values.items():
            setattr(self, name, value)

    def save(self) -> None:
        super().save()
        self._saved = {name: copy.deepcopy(getattr(self, name)) for name in self._names}

    def restore(self) -> None:
        for name, value in self._saved.items():
            setattr(self, name, copy.deepcopy(value))

    def sync(self) -> None:
        root, commits = self._newest()
        self._sync_values(root)
        self._commits = commits + 1  # whoever has this is ahead of those who have only begun

    def _begin_from(self, folder: str | os.PathLike[str]) -> None:
        """What ``Checkpoints.save`` was given beside its parts goes to the values of the same names, ``step`` too; others stay."""
        found = Checkpoints(folder, **self._parts()).restore()
        for name in self._names:
            if name in found:
                setattr(self, name, found[name])

    def _parts(self) -> dict[str, Any]:
        """What a checkpoint keeps by its ``state_dict``."""
        return {}

    def _sync_values(self, root: int) -> None:
        values = broadcast_object({name: getattr(self, name) for name in self._names}, root, "elastic.values")
        for name, value in values.items():
            setattr(self, name, value)
        self._saved = copy.deepcopy(values)


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
