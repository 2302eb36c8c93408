"""GradScaler: recognised through whatever stands between it and the optimizer; a step that it skips leaves nothing behind."""

import copy
import pickle
import sys
import warnings

import collective_core.torch as hvd
import common
import torch
from torch import nn

hvd.init()
rank, size = hvd.rank(), hvd.size()
OptState = sys.modules[torch.amp.GradScaler.__module__].OptState


def make(kind=torch.optim.SGD, wrap=lambda own: own, op=hvd.Average):
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    return model, hvd.DistributedOptimizer(wrap(kind(model.parameters(), lr=0.1)), model.named_parameters(), op=op)


def batch(value, is_finite=True):
    return torch.full((1, 2), float(value)) if is_finite or rank < size - 1 else torch.tensor([[float("inf"), 1.0]])


class Delegating:
    def __init__(self, own):
        self.own = own

    def __getattr__(self, name):
        return getattr(self.own, name)


class Inheriting:
    """As Lightning's: it has the optimizer's methods, which do not find its attributes in the object itself."""

    def __init__(self, own):
        self.own = own
        self.__class__ = type("Inheriting", (Inheriting, type(own)), {})

    def __getattr__(self, name):
        return getattr(self.own, name)

    def step(self):
        return self.own.step()


class Listing:
    """Has no more than a scaler and a training loop ask for."""

    def __init__(self, own):
        self.step, self.zero_grad, self._own = own.step, own.zero_grad, own

    @property
    def param_groups(self):
        return [group for group in self._own.param_groups]  # noqa: C416 - another frame


class Around(torch.optim.Optimizer):
    """An optimizer that has another one's parameters and state."""

    param_groups = property(lambda self: self.base.param_groups)
    state = property(lambda self: self.base.state)

    def __init__(self, base):
        self.base, self.defaults = base, base.defaults

    def step(self, closure=None):
        return self.base.step(closure)

    def zero_grad(self, set_to_none=True):
        self.base.zero_grad(set_to_none)


class Thorough(torch.amp.GradScaler):
    """Looks itself, and twice."""

    def unscale_(self, optimizer):
        state, found = self._per_optimizer_states[id(optimizer)], torch.zeros(())
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad.mul_(1 / self._scale.item())
        for group in optimizer.param_groups:
            found += sum(not p.grad.isfinite().all() for p in group["params"])
        state["found_inf_per_device"], state["stage"] = {found.device: found}, OptState.UNSCALED


def train(between, kind, clips, wrap, op):
    model, optimizer = make(wrap=wrap, op=op)
    optimizer, scaler = between(optimizer), kind("cpu", init_scale=1024.0)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(model(batch(rank + 1 + step, step != 1)).sum()).backward()
        if clips:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
        scaler.step(optimizer)
        scaler.update()
    assert scaler._scale.item() == 512.0
    return model.weight.detach()


for op in (hvd.Average, hvd.Sum):
    mean = (size + 1) / 2 * (1 if op == hvd.Average else size)
    beyond = 2 * (1 if op == hvd.Average else size)
    for between in (lambda own: own, Delegating, Inheriting, Listing):
        for kind in (torch.amp.GradScaler, hvd.GradScaler, Thorough):
            for clips in (False, True):
                for wrap in (lambda own: own, Around):
                    got = train(between, kind, clips, wrap, op)
                    torch.testing.assert_close(got, torch.full((1, 2), 1 - 0.1 * (2 * mean + beyond)))


# Schedulers, groups that come later, states and copies know the groups as they are.
model, optimizer = make()
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
late = nn.Parameter(torch.ones(1, 2))
optimizer.add_param_group({"params": [late], "lr": 1.0})
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(3):
    optimizer.zero_grad()
    scaler.scale((model(batch(rank + 1)) + (late * batch(rank + 1, step != 1)).sum()).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    if step == 0:
        scheduler.step()
mean = (size + 1) / 2
torch.testing.assert_close(model.weight.detach(), torch.full((1, 2), 1 - (0.1 + 0.05) * mean))
torch.testing.assert_close(late.detach(), torch.full((1, 2), 1 - (1.0 + 0.5) * mean))
pickled = pickle.loads(pickle.dumps(optimizer.state_dict()))  # noqa: S301 - our own
for state in (optimizer.state_dict(), copy.deepcopy(optimizer.state_dict()), pickled):
    optimizer.load_state_dict(state)
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.5]
optimizer.param_groups[0]["lr"] = 0.0
optimizer.param_groups = optimizer.param_groups[:1]
assert [p is model.weight for group in optimizer.param_groups for p in group["params"]] == [True]
assert not hasattr(type(optimizer).__new__(type(optimizer)), "param_groups")


# After a skipped step, and without zero_grad of the optimizer, the next one is of all ranks' gradients, also where no hook has noted them.
def skip(scaler, optimizer):
    scaler.step(optimizer)


def skip_reduced(scaler, optimizer):
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        scaler.step(optimizer)


def plainly(_scaler, optimizer):
    optimizer.step()


def again(scaler, optimizer):
    scaler._scale.fill_(1.0)
    scaler.step(optimizer)


def unnoted(loss):
    hooks, optimizer._reducer._number_of_hook = optimizer._reducer._number_of_hook, [-1] * len(optimizer._reducer._hooked)
    loss.backward()
    optimizer._reducer._number_of_hook = hooks


def compiled(loss):
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda: loss.backward(), backend="eager")()


for backward in (torch.Tensor.backward, *((compiled,) if "compiled" in sys.argv else (unnoted,))):
    for left_out in (skip, skip_reduced):
        for take in (plainly, again):
            model, optimizer = make()
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            scaler.scale(model(batch(1, False)).sum()).backward()
            left_out(scaler, optimizer)
            scaler.update()
            model.zero_grad()
            backward(model(batch(rank + 1)).sum())
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                take(scaler, optimizer)
            torch.testing.assert_close(model.weight.detach(), torch.full((1, 2), 1 - 0.1 * mean), msg=f"{backward, left_out, take}")

# A whole training step that is compiled.
if "compiled" in sys.argv:
    for compiles_backward in (False, True):
        for clips in (False, True):
            model, optimizer = make()
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

            @torch.compile(backend="eager")
            def whole(x, model=model, optimizer=optimizer, scaler=scaler, clips=clips):
                optimizer.zero_grad()
                scaler.scale(model(x).sum()).backward()
                if clips:
                    scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
                scaler.step(optimizer)
                scaler.update()

            with torch._dynamo.config.patch(compiled_autograd=compiles_backward):
                for step in range(3):
                    whole(batch(rank + 1 + step, step != 1))
            torch._dynamo.reset()
            assert scaler._scale.item() == 512.0
            torch.testing.assert_close(model.weight.detach(), torch.full((1, 2), 1 - 0.1 * (2 * mean + 2)))
common.report(done=True)
