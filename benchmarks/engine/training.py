"""Training steps: the engine, DDP and FSDP2 over Gloo and over the engine, and the same processes without any communication.

Another side does not communicate either, but its ranks meet at the end of every step: what waiting for each other costs, which no way
of summing gradients can avoid.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Iterable, NamedTuple

import collective_core.torch as hvd
import torch
import torch.nn.functional as F
from collective_core.runtime import cores, membership
from torch import nn

import collective_core as cc

from . import engines, measure, report
from .options import Options


class Mnist(nn.Module):
    """The network of Horovod's MNIST example: 21,840 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.relu(F.max_pool2d(self.conv1(images), 2))
        x = F.relu(F.max_pool2d(F.dropout2d(self.conv2(x), training=self.training), 2))
        x = F.dropout(F.relu(self.fc1(x.flatten(1))), training=self.training)
        return F.log_softmax(self.fc2(x), dim=1)


class Mlp(nn.Sequential):
    """Six layers with 25 million parameters: much to send for little to compute."""

    width, layers = 2048, 6

    def __init__(self) -> None:
        super().__init__(*[part for _ in range(self.layers) for part in (nn.Linear(self.width, self.width), nn.ReLU())])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return F.log_softmax(super().forward(rows), dim=1)


class Small(nn.Module):
    """100 parameters of 1 KiB: what each tensor costs, whatever its size."""

    width, layers = 256, 100

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ParameterList(torch.randn(self.width) / self.width for _ in range(self.layers))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for step in self.steps:
            rows = rows + step
        return F.log_softmax(rows, dim=1)


class Task(NamedTuple):
    """What is trained: the model, one row of its input, the number of classes, and the usual options."""

    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int
    momentum: float
    batch: int


TASKS = {
    "mnist": Task(Mnist, (1, 28, 28), 10, 0.5, 64),
    "mlp": Task(Mlp, (Mlp.width,), Mlp.width, 0.0, 8),
    "small": Task(Small, (Small.width,), Small.width, 0.0, 8),
}
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Side = Callable[[nn.Module, MakeOptimizer], "tuple[nn.Module, torch.optim.Optimizer]"]


def ours(model: nn.Module, make_optimizer: MakeOptimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return model, hvd.DistributedOptimizer(make_optimizer(model.parameters()), named_parameters=model.named_parameters())


def ddp(backend: str, model: nn.Module, make_optimizer: MakeOptimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
    return nn.parallel.DistributedDataParallel(model, process_group=_group(backend)), make_optimizer(model.parameters())


def fsdp(backend: str, model: nn.Module, make_optimizer: MakeOptimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
    """FSDP2, a unit per layer. Raises ImportError before PyTorch 2.6."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(_group(backend), "cpu")
    for layer in (part for part in model.modules() if isinstance(part, (nn.Linear, nn.Conv2d))):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for part in model.modules():
        if hasattr(part, "set_allocate_memory_from_process_group_for_comm"):  # from PyTorch 2.9 on; Gloo has no memory of its own
            part.set_allocate_memory_from_process_group_for_comm(True)
    return model, make_optimizer(model.parameters())


def alone(model: nn.Module, make_optimizer: MakeOptimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, make_optimizer(model.parameters())


def _group(backend: str) -> Any:
    """A group of all ranks over this backend of torch.distributed, beside the default one."""
    engines.start_gloo()
    return torch.distributed.new_group(backend=backend)


SIDES: dict[str, Side] = {
    "collective_core": ours,
    "ddp": partial(ddp, "gloo"),
    "collective-ddp": partial(ddp, "collective"),
    "fsdp": partial(fsdp, "gloo"),
    "collective-fsdp": partial(fsdp, "collective"),
    "barrier": alone,
    "none": alone,
}


def training_step(side: str, task: Task, batch: int) -> measure.Step:
    """One whole step, as a script would write it: gradients to None, forward, backward, optimizer. The input is invented."""
    model, optimizer = SIDES[side](task.model(), partial(torch.optim.SGD, lr=0.01, momentum=task.momentum))
    inputs, labels = torch.randn(batch, *task.shape), torch.randint(0, task.classes, (batch,))

    def step() -> None:
        optimizer.zero_grad()
        F.nll_loss(model(inputs), labels).backward()  # type: ignore[no-untyped-call,unused-ignore]
        optimizer.step()
        if side == "barrier":
            cc.barrier()

    return step


def begin() -> membership.Membership:
    """This rank, which from now on computes with its share of the host's cores."""
    member = membership.current()
    torch.set_num_threads(cores.share(member.local_size, cores.launcher()))
    return member


def compare(make_step: Callable[[str], measure.Step], ours: str, wanted: Options, batch: int, **facts: int) -> dict[str, Any]:
    """The document of ``--train``: our side, its peers, and those that sum nothing. A peer that cannot start is named as missing."""
    names, steps, missing = [], [], {}
    for side in (ours, *wanted.peers, "barrier", "none"):
        try:
            steps.append(make_step(side))
            names.append(side)
        except (ImportError, RuntimeError) as error:
            if side not in wanted.peers:
                raise
            missing[side] = str(error)
    # Ranks that do not communicate do not wait for each other either: what they do together is the mean of their speeds.
    seconds = measure.alternate(steps, wanted.rounds, independent=frozenset({len(steps) - 1}))
    size = membership.current().size
    return {
        "schema": report.SCHEMA,
        "train": wanted.train,
        "np": size,
        "batch": batch,
        "rounds": wanted.rounds,
        **facts,
        "results": [report.training_row(name, size, batch, spent) for name, spent in zip(names, seconds)],
        "missing": missing,
    }


def run(wanted: Options) -> dict[str, Any]:
    """The document of ``--train``, but for ``ctr`` and ``dlrm``."""
    torch.manual_seed(begin().rank)
    task = TASKS[str(wanted.train)]
    batch = wanted.batch or task.batch
    parameters = sum(p.numel() for p in task.model().parameters())
    return compare(lambda side: training_step(side, task, batch), "collective_core", wanted, batch, parameters=parameters)
