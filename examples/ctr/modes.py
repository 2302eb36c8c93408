"""The ways in which ranks train one model together: what makes its tables, and what makes its optimizer.

Each mode has Adagrad, whose sparse and dense steps are the same: rows that no rank has used stay as they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import collective_core.torch as hvd
import torch
from model import MODELS
from torch import nn

Optimizer = torch.optim.Optimizer
warnings.filterwarnings("ignore", "Sparse invariant checks")  # in PyTorch's Adagrad


@dataclass
class Job:
    """``ranks``: those that train, a process set: with parameter servers not all. ``staleness``: of these, docs/parameter-server.md."""

    ranks: Any
    rows: int
    lr: float
    staleness: int | None


def initial_rows(rows: int, columns: int, width: float) -> torch.Tensor:
    """The same in all modes but ``ps``. A table that exceeds a rank's memory is given ``init`` and ``seed`` instead, as in ``ps``."""
    return torch.empty(rows, columns).uniform_(-width, width, generator=torch.Generator().manual_seed(columns))


def plain_table(job: Job, columns: int, width: float, sparse: bool) -> nn.Module:
    start = initial_rows(job.rows, columns, width)
    return nn.EmbeddingBag.from_pretrained(start, freeze=False, mode="sum", sparse=sparse)


def sharded_table(job: Job, columns: int, width: float) -> nn.Module:
    table = hvd.nn.ShardedEmbeddingBag(job.rows, columns, hvd.nn.Adagrad(), mode="sum", seed=0, process_set=job.ranks)
    table.load_weight(initial_rows(job.rows, columns, width))
    return table


def served_table(job: Job, columns: int, width: float) -> nn.Module:
    return hvd.ps.EmbeddingBag(job.rows, columns, hvd.nn.Adagrad(), mode="sum", scale=width)


def by_engine(job: Job, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
    hvd.broadcast_parameters(model.state_dict(), root_rank=0, process_set=job.ranks)
    return model, hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), process_set=job.ranks)


def by_ddp(_job: Job, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True), optimizer


def by_servers(job: Job, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
    return model, hvd.ps.DistributedOptimizer(optimizer, model, staleness=job.staleness)


def alone(_job: Job, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
    return model, optimizer


MODES: dict[str, tuple[Callable[..., nn.Module], Callable[[Job, nn.Module, Optimizer], tuple[nn.Module, Optimizer]]]] = {
    "sharded": (sharded_table, by_engine),
    "sparse": (partial(plain_table, sparse=True), by_engine),
    "dense": (partial(plain_table, sparse=False), by_engine),
    "ddp": (partial(plain_table, sparse=False), by_ddp),
    "ps": (served_table, by_servers),
    "alone": (partial(plain_table, sparse=True), alone),
}


def build(mode: str, model: str, job: Job) -> tuple[nn.Module, nn.Module, Optimizer]:
    """The model as it is evaluated, as it is trained, and its optimizer. Collective."""
    make_table, distribute = MODES[mode]
    torch.manual_seed(0)
    plain: nn.Module = MODELS[model](partial(make_table, job))
    trained, optimizer = distribute(job, plain, torch.optim.Adagrad(plain.parameters(), job.lr))
    return plain, trained, optimizer


def bytes_counted(n: int) -> float:
    """Bytes that this rank has sent to others so far in collectives of ``n`` ranks.

    A sum of S bytes sends 2 S (n - 1) / n, an alltoall S (n - 1) / n, and an allgather S (n - 1).
    """
    factors = {"allreduce": 2 * (n - 1) / n, "alltoall": (n - 1) / n, "allgather": n - 1}
    return sum(factors.get(row["kind"], 0) * row["bytes"] for row in hvd.metrics()["operations"])


def bytes_calculated(mode: str, model: nn.Module, n: int, used: float) -> float:
    """Bytes that a rank sends per step in the modes that ``hvd.metrics()`` does not count. ``used``: distinct rows of a batch."""
    dense = sum(p.numel() * p.element_size() for p in model.parameters())
    if mode == "ddp":
        return dense * 2 * (n - 1) / n
    # Ids of 8 bytes to pull the rows, and again with their gradients.
    return dense + used * sum(16 + 4 * part.embedding_dim for part in model.modules() if isinstance(part, hvd.ps.EmbeddingBag))
