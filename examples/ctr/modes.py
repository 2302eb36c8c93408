"""The ways in which ranks train one model together: what makes its tables, and what makes its optimizer.

Each mode has Adagrad, whose sparse and dense steps are the same: rows that no rank has used stay as they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import collective_core.torch as hvd
import torch
from model import MODELS
from torch import nn

Optimizer = torch.optim.Optimizer
warnings.filterwarnings("ignore", "Sparse invariant checks")  # in PyTorch's Adagrad


def initial_rows(rows: int, columns: int, width: float) -> torch.Tensor:
    """The same in all modes, so that they can be compared. A table that exceeds a rank's memory is given ``init`` and ``seed`` instead."""
    return torch.empty(rows, columns).uniform_(-width, width, generator=torch.Generator().manual_seed(columns))


def plain_table(rows: int, columns: int, width: float, sparse: bool) -> nn.Module:
    start = initial_rows(rows, columns, width)
    return nn.EmbeddingBag.from_pretrained(start, freeze=False, mode="sum", sparse=sparse)


def sharded_table(rows: int, columns: int, width: float) -> nn.Module:
    table = hvd.nn.ShardedEmbeddingBag(rows, columns, hvd.nn.Adagrad(), mode="sum", seed=0)
    table.load_weight(initial_rows(rows, columns, width))
    return table


def by_engine(model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return model, hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def by_ddp(model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True), optimizer


def alone(model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
    return model, optimizer


MODES: dict[str, tuple[Callable[..., nn.Module], Callable[[nn.Module, Optimizer], tuple[nn.Module, Optimizer]]]] = {
    "sharded": (sharded_table, by_engine),
    "sparse": (partial(plain_table, sparse=True), by_engine),
    "dense": (partial(plain_table, sparse=False), by_engine),
    "ddp": (partial(plain_table, sparse=False), by_ddp),
    "alone": (partial(plain_table, sparse=True), alone),
}


def build(mode: str, model: str, rows: int, lr: float) -> tuple[nn.Module, nn.Module, Optimizer]:
    """The model as it is evaluated, as it is trained, and its optimizer. Collective."""
    make_table, distribute = MODES[mode]
    torch.manual_seed(0)
    plain: nn.Module = MODELS[model](partial(make_table, rows))
    trained, optimizer = distribute(plain, torch.optim.Adagrad(plain.parameters(), lr))
    return plain, trained, optimizer


def bytes_sent(mode: str, model: nn.Module, steps: int, before: Any, after: Any) -> float:
    """Bytes that this rank has sent to others in each of ``steps`` steps, between two times at which ``hvd.metrics()`` was asked.

    Of n ranks a sum of S bytes sends 2 S (n - 1) / n, an alltoall S (n - 1) / n, and an allgather S (n - 1).
    """
    n = hvd.size()
    if mode == "ddp":
        return 2 * (n - 1) / n * sum(p.numel() * p.element_size() for p in model.parameters())
    factors = {"allreduce": 2 * (n - 1) / n, "alltoall": (n - 1) / n, "allgather": n - 1}

    def sent(metrics: Any) -> float:
        return sum(factors.get(row["kind"], 0) * row["bytes"] for row in metrics["operations"])

    return (sent(after) - sent(before)) / steps
