"""Ten samples over the ranks: every one once, a warning where steps differ, and the training of one process with all of them."""

import warnings

import collective_core.torch as hvd
import common
import torch

hvd.init()
rank, size = hvd.rank(), hvd.size()
samples, batch = 10, 2
x = torch.arange(samples * 3, dtype=torch.float64).remainder(5).reshape(samples, 3)
y = torch.arange(samples, dtype=torch.float64)

seen = []
for shuffle in (False, True):
    sampler = hvd.ShardSampler(range(samples), batch_size=batch, shuffle=shuffle)
    sampler.set_epoch(3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mine = list(sampler)
    assert len(mine) == len(sampler)
    shares = hvd.allgather(torch.tensor(mine, dtype=torch.int64)).tolist()
    assert sorted(shares) == list(range(samples)), shares
    seen.append([str(entry.message) for entry in caught if entry.category is hvd.UnevenDataWarning])
assert seen[0] == seen[1]

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    list(hvd.ShardSampler(range(2 * size + 1), batch_size=3, whole_batches=True))
assert len(caught) == (1 if size > 1 and rank == 0 else 0), "rank 0 has three samples, and a whole batch; the others have two"

even = list(hvd.ShardSampler(range(samples), drop_last=True, shuffle=False))
assert len(even) == samples // size
assert hvd.compare_steps(rank + 5) == {r: r + 5 for r in range(size)}
for wrong in (lambda: hvd.compare_steps(-1), lambda: hvd.sample_weight(-1), lambda: hvd.ShardSampler([1], batch_size=0)):
    try:
        wrong()
        raise RuntimeError("a number that makes no sense was taken")
    except ValueError:
        pass
assert hvd.sample_weight(7) == 1.0
assert hvd.sample_weight(0) == 0.0

# A step of all ranks is a step of one process over their samples together, also where some have fewer, or none any more.
torch.manual_seed(0)
model = torch.nn.Linear(3, 1).double()
alone = torch.nn.Linear(3, 1).double()
alone.load_state_dict(model.state_dict())
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
reference = torch.optim.SGD(alone.parameters(), lr=0.01)
shares = [list(range(samples))[r::size] for r in range(size)]
for step in range(-(-len(shares[0]) // batch)):
    parts = [share[step * batch : (step + 1) * batch] for share in shares]
    together = sorted(index for part in parts for index in part)
    reference.zero_grad()
    torch.nn.functional.mse_loss(alone(x[together]).squeeze(1), y[together]).backward()
    reference.step()
    if parts[rank]:
        optimizer.zero_grad()
        weight = hvd.sample_weight(len(parts[rank]))
        (torch.nn.functional.mse_loss(model(x[parts[rank]]).squeeze(1), y[parts[rank]]) * weight).backward()
        optimizer.step()
last = hvd.join()
hvd.broadcast_parameters(model.state_dict(), root_rank=last)
for trained, wanted in zip(model.parameters(), alone.parameters(), strict=True):
    assert torch.allclose(trained, wanted, rtol=1e-12), (trained, wanted)
common.report(warnings=seen[0])
hvd.shutdown()
