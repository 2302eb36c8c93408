"""GradScaler: an infinity on one rank has all ranks skip the step, in every order of calls; otherwise the scale changes nothing."""

from itertools import product

import collective_core.torch as hvd
import common
import torch
from torch import nn

hvd.init()
rank, size = hvd.rank(), hvd.size()
INFINITE = 2  # the step in which the last rank's gradient is not finite


def plainly(scaler, optimizer, _model):
    scaler.step(optimizer)


def clipped(scaler, optimizer, model):
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
    scaler.step(optimizer)


def as_with_horovod(scaler, optimizer, model):
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)


def everywhere(value):
    return hvd.allgather(value.detach().view(1, -1))


def train(kind, options, passes, way, op):
    """Weights after every step, with a scaler and without."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    own = kind(model.parameters(), lr=0.1, **options)
    optimizer = hvd.DistributedOptimizer(own, model.named_parameters(), backward_passes_per_step=passes, op=op)
    scaler = hvd.GradScaler(init_scale=1024.0, enabled=way is not None)
    found = []
    for step in range(4):
        optimizer.zero_grad()
        for _ in range(passes):
            x = torch.full((1, 2), rank + 1.0 + step)
            if step == INFINITE and rank == size - 1 and way is not None:
                x[0, 0] = float("inf")
            scaler.scale(model(x).sum()).backward()
        if way is not None:
            way(scaler, optimizer, model)
            scaler.update()
        elif step != INFINITE:
            optimizer.step()
        else:
            optimizer.synchronize()
        found.append(model.weight.detach().clone())
        assert torch.equal(everywhere(model.weight), everywhere(model.weight)[:1].expand(size, -1)), "the replicas differ"
    if way is not None and op != hvd.Adasum:
        assert everywhere(scaler._scale).unique().tolist() == [512.0]
    return torch.cat(found)


def leave_out_a_step(leave, forget, through_scaler):
    """Weights after a step that follows one that was reduced and then left out."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(torch.full((1, 2), 100.0 + rank)).sum()).backward()
    leave(scaler, optimizer)
    forget(model, optimizer)
    scaler.scale(model(torch.full((1, 2), rank + 1.0)).sum()).backward()
    if through_scaler:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    return model.weight.detach()


def looked_at(scaler, optimizer):
    scaler.unscale_(optimizer)
    scaler.update()


def only_reduced(_scaler, optimizer):
    optimizer.synchronize()


FORGETTING = (lambda _model, optimizer: optimizer.zero_grad(), lambda model, _optimizer: model.zero_grad())
for choice in product((looked_at, only_reduced), FORGETTING, (False, True)):
    torch.testing.assert_close(
        leave_out_a_step(*choice), torch.full((1, 2), 1 - 0.1 * (size + 1) / 2), msg=lambda text, c=choice: f"{c}: {text}"
    )

KINDS = ((torch.optim.SGD, {"momentum": 0.9}), (torch.optim.SGD, {"momentum": 0.9, "fused": True}), (torch.optim.Adam, {"fused": True}))
for kind, options in KINDS:
    for passes, op in ((1, hvd.Average), (2, hvd.Sum)):
        expected = train(kind, options, passes, None, op)
        for way in (plainly, clipped, as_with_horovod):
            got = train(kind, options, passes, way, op)
            torch.testing.assert_close(got, expected, msg=lambda text, what=(kind, options, passes, op, way): f"{what}: {text}")
    # With Adasum a rank without a step adds nothing to those of the others.
    for way in (plainly, clipped):
        weights = train(kind, options, 1, way, hvd.Adasum)
        assert torch.isfinite(weights).all(), (kind, options, way)
        assert (weights[INFINITE] != weights[INFINITE - 1]).any() == (size > 1), (kind, options, way)


# Without a reduction before it, each rank would look at its own gradients: an error on every rank, whatever the scaler and the optimizer.
class Inattentive(hvd.GradScaler):
    """Looks, and has a fused optimizer's step look, without asking anybody."""

    def step(self, optimizer):
        optimizer.grad_scale, optimizer.found_inf = self._scale, torch.zeros(())
        try:
            return optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf


def skipping(method):
    def attempt(scaler, optimizer):
        with optimizer.skip_synchronize():
            getattr(scaler, method)(optimizer)

    return attempt


for fused in (False, True):
    attempts = [(hvd.GradScaler, skipping("step")), (hvd.GradScaler, skipping("unscale_"))]
    attempts += [(Inattentive, skipping("step")), (Inattentive, lambda scaler, optimizer: scaler.step(optimizer))] if fused else []
    for kind, attempt in attempts:
        model = nn.Linear(2, 1, bias=False)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, fused=fused), model.named_parameters())
        scaler, before = kind(init_scale=1024.0), model.weight.detach().clone()
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        try:
            attempt(scaler, optimizer)
            said = "nothing"
        except hvd.HorovodInternalError as error:
            said = str(error)
        assert ("before the gradients were reduced" in said) == (size > 1), said
        assert torch.equal(model.weight.detach(), before) == (size > 1)
        if size > 1:
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            assert not torch.equal(model.weight.detach(), before)
common.report(done=True)
