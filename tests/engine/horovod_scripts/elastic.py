"""An elastic script as Horovod's users write them."""

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.elastic.state import StateHandler

hvd.init()
model = torch.nn.Linear(4, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters())
sampler = ElasticSampler(torch.arange(32), shuffle=False)


@hvd.elastic.run
def train(state):
    for state.epoch in range(state.epoch, 2):  # noqa: B020 - as scripts for Horovod have it
        for number, index in enumerate(sampler):
            optimizer.zero_grad()
            model(torch.full((1, 4), float(index))).sum().backward()
            optimizer.step()
            state.sampler.record_batch(number, 1)
            state.commit()
        state.sampler.set_epoch(state.epoch + 1)
    return state.epoch


state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0)
state.register_reset_callbacks([lambda: None])
assert issubclass(HorovodInternalError, RuntimeError)
assert issubclass(HostsUpdatedInterrupt, RuntimeError)
assert isinstance(StateHandler, type)
print(f"rank {hvd.rank()} of {hvd.size()} epoch {train(state)}", flush=True)
