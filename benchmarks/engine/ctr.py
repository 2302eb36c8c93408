"""A step of a click-through-rate model: one table of many rows, of which each batch uses a few thousand, and a small network above it, or
with ``--train dlrm`` the two networks of DLRM.

Sides: the sharded table; the same processes without any communication, each with a whole table and PyTorch's sparse gradients; PyTorch's
own row-wise sharding (``rowwise``: RowwiseParallel of ``nn.Embedding``) and TorchRec's (``torchrec``), with DDP for the network, over Gloo;
and the ways of data parallelism: sparse gradients through the engine (``sparse``) and through DDP over Gloo (``ddp-sparse``), dense ones
through the engine (``dense``) and through DDP over Gloo (``ddp``). All tables are updated by SGD, which needs the least memory and time of
the dense sides. Ids of a feature are drawn with probability ~ 1 / (id + 1) (Zipf's law with exponent 1).
"""

from __future__ import annotations

from functools import partial
from itertools import count
from typing import Any, Callable

import collective_core.torch as hvd
import torch
from torch import nn

import collective_core as cc

from . import engines, measure, training
from .options import Options

COLUMNS, FEATURES, NUMBERS = 16, 26, 13  # as Criteo's data set: 26 categories, 13 numbers
HIDDEN = (256, 64)
DEFAULT_BATCH = 2048
LR = 0.01
#: Batches that are trained on in turn: more than the caches hold.
BATCHES = 16

Table = Callable[[int], nn.Module]
Batches = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
plain_dense: Table = partial(nn.Embedding, embedding_dim=COLUMNS)
plain_sparse: Table = partial(nn.Embedding, embedding_dim=COLUMNS, sparse=True)


class Model(nn.Module):
    """The rows of all categories and the numbers, side by side, into a network of three layers."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table
        sizes = (FEATURES * COLUMNS + NUMBERS, *HIDDEN)
        layers = [part for a, b in zip(sizes, sizes[1:]) for part in (nn.Linear(a, b), nn.ReLU())]
        self.network = nn.Sequential(*layers, nn.Linear(HIDDEN[-1], 1))

    def forward(self, ids: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.network(torch.cat([self.table(ids).flatten(1), numbers], 1))
        return scores[:, 0]


class Dlrm(Model):
    """As published: the numbers through a network of their own, and the products of all pairs of it and the rows into another."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__(table)
        self.numbers = nn.Sequential(nn.Linear(NUMBERS, HIDDEN[-1]), nn.ReLU(), nn.Linear(HIDDEN[-1], COLUMNS), nn.ReLU())
        vectors = FEATURES + 1
        self.network[0] = nn.Linear(COLUMNS + vectors * (vectors - 1) // 2, HIDDEN[0])
        self._pairs = torch.tril_indices(vectors, vectors, offset=-1)

    def forward(self, ids: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        dense = self.numbers(numbers)
        vectors = torch.cat([dense[:, None], self.table(ids)], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self._pairs[0], self._pairs[1]]
        scores: torch.Tensor = self.network(torch.cat([dense, products], 1))
        return scores[:, 0]


MODELS: dict[str | None, type[Model]] = {"ctr": Model, "dlrm": Dlrm}


def batches_of(seed: int, rows: int, batch: int, number: int = BATCHES) -> Batches:
    """Ids, numbers and clicks: each feature has its own part of the rows."""
    generator = torch.Generator().manual_seed(seed)
    each = rows // FEATURES
    made = []
    for _ in range(number):
        ranks_of_ids = (
            torch.rand(batch, FEATURES, generator=generator, dtype=torch.float64).mul(float(torch.tensor(each + 1.0).log())).exp()
        )
        ids = ranks_of_ids.long().sub(1).clamp(0, each - 1) + torch.arange(FEATURES) * each
        clicks = torch.randint(2, (batch,), generator=generator).float()
        made.append((ids, torch.randn(batch, NUMBERS, generator=generator), clicks))
    return made


def _engine(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    return model, hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def _gloo() -> Any:
    engines.start_gloo()
    return torch.distributed.new_group(backend="gloo")


def _ddp(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    options = {"process_group": _gloo(), "gradient_as_bucket_view": True}
    return nn.parallel.DistributedDataParallel(model, **options), torch.optim.SGD(model.parameters(), lr=LR)


def _rowwise(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Raises ImportError before PyTorch 2.5."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

    mesh = DeviceMesh.from_group(_gloo(), "cpu")
    parallelize_module(model.table, mesh, RowwiseParallel(input_layouts=Shard(0), output_layouts=Shard(0)))
    for name in [name for name, _ in model.named_children() if name != "table"]:
        setattr(model, name, nn.parallel.DistributedDataParallel(getattr(model, name), process_group=mesh.get_group()))
    # Gradients of rows are summed over the ranks, those of the network averaged.
    rows = {"params": model.table.parameters(), "lr": LR / mesh.size()}
    others = [p for name, p in model.named_parameters() if not name.startswith("table.")]
    return model, torch.optim.SGD([rows, {"params": others}], lr=LR)


def _alone(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, torch.optim.SGD(model.parameters(), lr=LR)


def _torchrec(rows: int) -> nn.Module:
    from .torchrec_table import Table

    return Table(rows, COLUMNS, FEATURES, LR, _gloo())


def _sharded(rows: int) -> nn.Module:
    return hvd.nn.ShardedEmbedding(rows, COLUMNS, hvd.nn.SGD(), seed=0)


SIDES: dict[str, tuple[Table, Callable[[nn.Module], tuple[nn.Module, torch.optim.Optimizer]]]] = {
    "sharded": (_sharded, _engine),
    "rowwise": (plain_dense, _rowwise),
    "torchrec": (_torchrec, _ddp),
    "sparse": (plain_sparse, _engine),
    "ddp-sparse": (plain_sparse, _ddp),
    "dense": (plain_dense, _engine),
    "ddp": (plain_dense, _ddp),
    "barrier": (plain_sparse, _alone),
    "none": (plain_sparse, _alone),
}


def training_step(side: str, make_model: type[Model], rows: int, data: Batches) -> measure.Step:
    make_table, distribute = SIDES[side]
    model, optimizer = distribute(make_model(make_table(rows)))
    numbers = count()

    def step() -> None:
        ids, dense, clicks = data[next(numbers) % len(data)]
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(ids, dense), clicks).backward()  # type: ignore[no-untyped-call,unused-ignore]
        optimizer.step()
        if side == "barrier":
            cc.barrier()

    return step


def run(wanted: Options) -> dict[str, Any]:
    """The document of ``--train ctr`` and ``--train dlrm``."""
    rank = training.begin().rank
    torch.manual_seed(0)
    batch, make_model = wanted.batch or DEFAULT_BATCH, MODELS[wanted.train]
    data = batches_of(rank, wanted.rows, batch)
    return training.compare(
        lambda side: training_step(side, make_model, wanted.rows, data),
        "sharded",
        wanted,
        batch,
        rows_per_batch=int(torch.tensor([float(len(ids.unique())) for ids, _, _ in data]).mean()),
        parameters=wanted.rows * COLUMNS + sum(p.numel() for p in make_model(nn.Identity()).parameters()),
    )
