"""``hvd.elastic.run``: calls a training function, and calls it again with the ranks that are there when they have changed."""

from __future__ import annotations

import functools
from typing import Any, Callable

from collective_core.elastic import worker
from collective_core.errors import CollectiveError
from collective_core.runtime import lifecycle
from collective_core.torch import handles
from collective_core.torch.checkpoint import restart_folder
from collective_core.torch.elastic.state import HostsUpdatedInterrupt, State
from collective_core.torch.optimizer import names

#: Kinds of failure after which the ranks that are left can go on; others are the program's own.
SURVIVABLE = ("peer_lost", "timeout", "internal", "closed")
#: Failures one after the other without a commit between them: what fails again and again is no accident.
MOST_FAILURES = 10


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Makes ``func(state, …)`` a function that survives the loss of ranks.

    Before each call the state is brought to the newest commit of any rank. After a failure of another rank it is first set back to the
    last commit; after a change of hosts it stays as it is. What the function raises by itself is raised, and so are failures in a job that
    is not elastic. Where the job was started with ``--restart-from`` and no rank has committed anything yet, the state begins from there.
    """

    @functools.wraps(func)
    def wrapped(state: State, *args: Any, **kwargs: Any) -> Any:
        lifecycle.init()
        failures, commits, folder, made = 0, state._commits, restart_folder(), names.made()
        while True:
            lost: tuple[int, ...] = ()
            try:
                if folder is not None and state._newest()[1] == 0:
                    state._begin_from(folder)
                state.sync()
                return func(state, *args, **kwargs)
            except CollectiveError as error:
                failures = failures + 1 if state._commits == commits else 1
                if error.kind not in SURVIVABLE or not worker.is_one() or failures > MOST_FAILURES:
                    raise
                lost, commits = error.ranks, state._commits
                state.restore()
            except HostsUpdatedInterrupt:
                pass
            names.forget_made_after(made)
            lifecycle.rejoin(lost)
            handles.forget_all()
            state.on_reset()

    return wrapped
