"""Elastic jobs with JAX: ranks come and go, and what was committed is not lost.

@hvd.elastic.run
def train(state):
    while state.step < steps:
        state.params, state.opt_state = step(state.params, state.opt_state, batch_of(state.step))
        state.step += 1
        state.commit()

train(hvd.elastic.JaxState(params=params, opt_state=opt_state, step=0))
"""

from __future__ import annotations

from collective_core.common import elastic_states
from collective_core.common.elastic_states import HostsUpdatedInterrupt, ObjectState, State, run
from collective_core.jax import host_calls

__all__ = ["HostsUpdatedInterrupt", "JaxState", "ObjectState", "State", "run"]


class JaxState(ObjectState):
    """Trees of arrays and plain values as attributes: ``JaxState(params=params, opt_state=opt_state, step=0)``.

    What is saved is a copy, so that compiled functions may be given the arrays to keep (``donate_argnums``).
    """


elastic_states.translations.append(host_calls.take_failure)
elastic_states.before_commit.append(host_calls.wait)
