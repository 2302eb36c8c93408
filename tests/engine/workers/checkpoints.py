"""Trains, saves every step, forgets everything and goes on from the last checkpoint; arguments: the folder, and what to do."""

import json
import resource
import sys
import warnings
from pathlib import Path

import collective_core.torch as hvd
import common
import torch

hvd.init()
rank, size = hvd.rank(), hvd.size()
folder, task = Path(sys.argv[1]), sys.argv[2]
samples, batch, steps = 24, 2, 4


def fresh():
    torch.manual_seed(rank)  # other values than what is restored
    model = torch.nn.Linear(3, 1).double()
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1))
    sampler = hvd.ShardSampler(range(samples), batch_size=batch)
    return model, optimizer, sampler


def train(model, optimizer, sampler, count, each=None, first=0):
    order = iter(sampler)
    taken = []
    for step in range(first, first + count):
        mine = [next(order) for _ in range(batch)]
        taken += mine
        x = torch.tensor(mine, dtype=torch.float64).reshape(-1, 1).repeat(1, 3) / samples
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        sampler.advance(batch)
        if each:
            each(step + 1)
    return taken


def state(model):
    return [parameter.tolist() for parameter in model.parameters()]


def everywhere(values):
    return sorted(value for part in hvd.allgather_object(values) for value in part)


if task == "save":
    model, optimizer, sampler = fresh()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    checkpoints = hvd.Checkpoints(folder, keep=2, model=model, optimizer=optimizer, sampler=sampler)
    assert checkpoints.restore() == {}
    taken = train(model, optimizer, sampler, steps, lambda step: checkpoints.save(step, epoch=0, loss=0.5))
    saved = state(model)
    rest = train(model, optimizer, sampler, 1, first=steps)
    checkpoints.wait()
    assert sorted(path.name for path in folder.iterdir()) == ["step-000000000003.checkpoint", "step-000000000004.checkpoint"]

    again, its_optimizer, its_sampler = fresh()
    checkpoints = hvd.Checkpoints(folder, keep=2, model=again, optimizer=its_optimizer, sampler=its_sampler)
    assert checkpoints.restore() == {"step": steps, "epoch": 0, "loss": 0.5}
    assert state(again) == saved
    assert train(again, its_optimizer, its_sampler, 1) == rest
    assert state(again) == state(model), "the optimizer's state is the same, too"
    common.report(taken=everywhere(taken))
elif task == "go on":  # perhaps with another number of ranks
    model, optimizer, sampler = fresh()
    checkpoints = hvd.Checkpoints(folder, keep=2, model=model, optimizer=optimizer, sampler=sampler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = checkpoints.restore()
    passed_over = [str(entry.message) for entry in caught if entry.category is hvd.CheckpointWarning]
    sampler.set_epoch(0)
    common.report(found=found, state=state(model), rest=everywhere(list(sampler)), passed_over=passed_over)
elif task == "wrong":
    model, optimizer, sampler = fresh()
    said = []
    for act in (
        lambda: hvd.Checkpoints(folder, keep=0),
        lambda: hvd.Checkpoints(folder, model=7),
        lambda: hvd.Checkpoints(folder, model=model).save(3),
        lambda: hvd.Checkpoints(folder, model=model).save(1, bad=object()),
        lambda: hvd.Checkpoints(folder / ("long" * 100), model=model).save(1),
        lambda: hvd.Checkpoints(folder, model=model, optimizer=optimizer).restore(),
        lambda: sampler.load_state_dict({"epoch": 0, "behind": 0, "samples": 5}),
        lambda: sampler.advance(-1),
    ):
        try:
            act()
            said.append("nothing")
        except (ValueError, TypeError, hvd.CollectiveError) as error:
            said.append(f"{type(error).__name__}: {error}")
    # A disk that takes no more; a limit of this process is as good. Every rank is told, and the engine goes on.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        checkpoints = hvd.Checkpoints(folder, model=model, optimizer=optimizer, sampler=sampler)
        checkpoints.save(9)
        checkpoints.wait()
        said.append("nothing")
    except hvd.CollectiveError as error:
        said.append(f"{error.kind}: {error}")
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    hvd.barrier()
    common.report(said=said, files=sorted(path.name for path in folder.iterdir()))
else:  # a single process that saves until it is ended
    assert task == "for ever", json.dumps(task)
    model = torch.nn.Linear(200, 200)
    checkpoints = hvd.Checkpoints(folder, keep=2, model=model)
    step = checkpoints.restore().get("step", 0)
    print("begins", step, flush=True)
    while True:
        step += 1
        torch.nn.init.constant_(model.weight, float(step))
        checkpoints.save(step)
        print("saved", step - 1, flush=True)
