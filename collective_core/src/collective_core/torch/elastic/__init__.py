"""Elastic jobs with Horovod's interface: ranks come and go, and what was committed is not lost.

    hvd.init()
    model, optimizer = …, hvd.DistributedOptimizer(…)

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, epochs):
            for state.batch, (x, y) in …:
                …
                state.commit()

    train(hvd.elastic.TorchState(model, optimizer, batch=0, epoch=0))

Started by ``collective_core.launch --min-np 2 …`` or ``Runner(min_np=2, …)``; under other launchers it runs with the ranks that are there.
"""

from __future__ import annotations

from collective_core.common.elastic_states import run
from collective_core.torch.elastic.sampler import ElasticSampler
from collective_core.torch.elastic.state import HostsUpdatedInterrupt, ObjectState, State, TorchState

__all__ = ["ElasticSampler", "HostsUpdatedInterrupt", "ObjectState", "State", "TorchState", "run"]
