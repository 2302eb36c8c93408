"""Elastic jobs: what every rank saves in its memory, and a function that is called again with the ranks that are there.

The interfaces of the frameworks add states that know their models. What a framework's own operations need around a commit and a change of
ranks, they add to the lists below.
"""

from __future__ import annotations

import copy
import functools
import os
from typing import Any, Callable, Sequence

import numpy as np

from collective_core import arrays, job
from collective_core.common.objects import allgather_object, broadcast_object
from collective_core.elastic import worker
from collective_core.errors import CollectiveError
from collective_core.runtime import launchers, membership, process_sets
from collective_core.runtime.config import restart_folder

#: Kinds of failure after which the ranks that are left can go on; others are the program's own.
SURVIVABLE = ("peer_lost", "timeout", "internal", "closed")
#: Failures one after the other without a commit between them: what fails again and again is no accident.
MAX_FAILURES = 10

#: Called by ``commit`` before it saves: they wait for what is under way, and raise what has failed.
before_commit: list[Callable[[], None]] = []
#: Called when the ranks change, before this process leaves them.
before_rejoin: list[Callable[[], None]] = []
#: Called when a function of :func:`run` begins; each returns what is to be called then, too.
at_begin: list[Callable[[], Callable[[], None]]] = []
#: Called when this process has joined other ranks, before the state's own callbacks.
after_rejoin: list[Callable[[], None]] = []
#: For frameworks that raise errors of their own in place of the engine's: each finds the engine's, or None.
translations: list[Callable[[Exception], CollectiveError | None]] = []


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
        for finish in before_commit:
            finish()
        failure = membership.failure()
        if failure is not None:
            raise failure
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raises :class:`HostsUpdatedInterrupt` on all ranks when ranks are to be added or to leave. Collective."""
        if not launchers.is_elastic():
            return
        if process_sets.is_reserved():  # workers of parameter servers, which go on at their own speeds
            if worker.shall_change():
                raise HostsUpdatedInterrupt
            return
        flag = np.array([1 if worker.shall_change() else 0], dtype=np.int32)
        if arrays.allreduce(flag, name="elastic.change", op=arrays.Max)[0]:
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
        text = (
            f"--restart-from {folder}: a {type(self).__name__} cannot begin from a checkpoint; "
            "use TorchState or ObjectState of collective_core.torch"
        )
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

    def _sync_values(self, root: int) -> None:
        values = broadcast_object({name: getattr(self, name) for name in self._names}, root, "elastic.values")
        for name, value in values.items():
            setattr(self, name, value)
        self._saved = copy.deepcopy(values)


def _of_engine(error: Exception) -> CollectiveError | None:
    if isinstance(error, CollectiveError):
        return error
    return next((found for found in (translate(error) for translate in translations) if found is not None), None)


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Makes ``func(state, …)`` a function that survives the loss of ranks.

    Before each call the state is brought to the newest commit of any rank. After a failure of another rank it is first set back to the
    last commit; after a change of hosts it stays as it is. What the function raises by itself is raised, and so are failures in a job that
    is not elastic. Where the job was started with ``--restart-from`` and no rank has committed anything yet, the state begins from there.
    """

    @functools.wraps(func)
    def wrapped(state: State, *args: Any, **kwargs: Any) -> Any:
        job.init()
        failures, commits, folder, has_rejoined = 0, state._commits, restart_folder(), False
        at_change = [begin() for begin in at_begin]
        while True:
            lost: tuple[int, ...] = ()
            try:
                if has_rejoined:  # what fails here has met other ranks, as what fails in the function
                    for rejoined in after_rejoin:
                        rejoined()
                    state.on_reset()
                if folder is not None and state._newest()[1] == 0:
                    state._begin_from(folder)
                state.sync()
                commits = state._commits  # what sync() counts is not progress
                return func(state, *args, **kwargs)
            except HostsUpdatedInterrupt:
                pass
            except Exception as raised:
                error = _of_engine(raised)
                if error is None:
                    raise
                failures, commits = failures + 1 if state._commits == commits else 1, state._commits
                if error.kind not in SURVIVABLE or not launchers.is_elastic() or failures > MAX_FAILURES:
                    raise
                lost = error.ranks
                state.restore()
            for leave in [*before_rejoin, *at_change]:  # also of what the function has been the first to use
                leave()
            job.rejoin(lost)
            has_rejoined = True

    return wrapped
