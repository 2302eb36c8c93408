"""Means over all ranks that travel compressed, and what they leave out, which the next mean is to contain (error feedback).

Each is a generator that starts operations and yields the handle it needs next, so that several can go on together and a caller can
compute meanwhile: :class:`Exchange` drives one, :func:`run` several. It returns a :class:`Mean`. All ranks get the same bits.

Bytes sent by each of n ranks for N float32 values; a plain mean sends 2(n-1)/n · 4N:

    whole       one allreduce
    quantized   2(n-1)/n · N · bits/8 (and 3 % or 6 % for scales): alltoall, every rank's part is averaged, allgather; of two ranks, which
                send as much either way, one allgather
    top_k       (n-1) · 8 · ratio · N: an allgather of positions and values
    low_rank    2(n-1)/n · 4 · rank · (rows + columns) for each matrix, in two allreduces

References: 1-bit Adam, arXiv 2102.02888 (alltoall and allgather of quantized parts, error feedback on both); Deep Gradient Compression,
arXiv 1712.01887; PowerSGD, arXiv 1905.13727.
"""

from __future__ import annotations

import math
from typing import Generator, Iterable, NamedTuple, Sequence

import torch

from collective_core.errors import CollectiveError
from collective_core.extensions.slow_networks.quantization import BLOCK, pack, unpack
from collective_core.runtime.process_sets import ProcessSet, members_of
from collective_core.torch.handles import abandon, synchronize
from collective_core.torch.ops.allgather import allgather_async
from collective_core.torch.ops.allreduce import Average, Sum, allreduce_async_
from collective_core.torch.ops.alltoall import alltoall_async


class Mean(NamedTuple):
    """``values``: the mean of all ranks' values, as it travelled. ``residual``: what this rank is to add to its next values."""

    values: torch.Tensor
    residual: torch.Tensor


#: Yields handles, is sent their results.
Steps = Generator[int, torch.Tensor, Mean]


class Exchange:
    """A compressed mean under way."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._handle = next(steps)
        self.mean: Mean | None = None

    def advance(self) -> bool:
        """Waits for what is under way, and starts what follows it. Whether it is over. Collective."""
        try:
            self._handle = self._steps.send(synchronize(self._handle))
        except StopIteration as end:
            self.mean = end.value
        return self.mean is not None

    def drop(self) -> None:
        """Nobody waits for it any more."""
        abandon(self._handle)


def run(steps: Iterable[Steps]) -> list[Mean]:
    """All of them together: those that need as many operations wait for the network at the same time."""
    exchanges = [Exchange(each) for each in steps]
    going = exchanges
    while going:
        going = [exchange for exchange in going if not exchange.advance()]
    return [exchange.mean for exchange in exchanges if exchange.mean is not None]


def whole(values: torch.Tensor, name: str, process_set: ProcessSet | None) -> Steps:
    """The mean itself, in ``values``, which it overwrites."""
    mean = yield allreduce_async_(values, name=name, op=Average, process_set=process_set)
    return Mean(mean, torch.zeros(0))


def quantized(values: torch.Tensor, bits: int, name: str, process_set: ProcessSet | None) -> Steps:
    """Of float32 values, one dimension, in 8 or 4 bits (quantization.py)."""
    members, count = members_of(process_set), values.numel()
    if members.size == 2:
        padded = torch.nn.functional.pad(values, (0, -count % BLOCK)).unsqueeze(0)
        gathered = yield allgather_async(pack(padded, bits), name=f"{name}.{bits}bit", process_set=process_set)
        _refuse_joined(len(gathered), members.size, name)
        found = unpack(gathered, padded.shape[1], bits)[:, :count]
        return Mean((found[0] + found[1]) / 2, _finite(values - found[members.rank]))
    part = -(-count // (members.size * BLOCK)) * BLOCK
    rows = torch.nn.functional.pad(values, (0, members.size * part - count)).view(members.size, part)
    sent = pack(rows, bits)
    received, _ = yield alltoall_async(sent, name=f"{name}.{bits}bit.parts", process_set=process_set)
    _refuse_joined(len(received), members.size, name)
    total = torch.zeros_like(rows[0])
    for rank, theirs in enumerate(received.split(1)):
        total += rows[rank] if rank == members.rank else unpack(theirs, part, bits)[0]  # what is not sent need not be rounded
    total /= members.size
    mine = pack(total.unsqueeze(0), bits)
    gathered = yield allgather_async(mine, name=f"{name}.{bits}bit.means", process_set=process_set)
    _refuse_joined(len(gathered), members.size, name)
    residual = rows - unpack(sent, part, bits)
    # What the mean of this rank's part has lost, all ranks have lost: it comes back through this rank alone.
    residual[members.rank] = (total - unpack(mine, part, bits)[0]) * members.size
    return Mean(unpack(gathered, part, bits).view(-1)[:count], _finite(residual.view(-1)[:count]))


def top_k(values: torch.Tensor, ratio: float, name: str, process_set: ProcessSet | None) -> Steps:
    """Of each rank's float32 values, one dimension, the share ``ratio`` with the largest magnitudes (one at least); others count as 0."""
    members = members_of(process_set)
    count = max(1, math.ceil(ratio * values.numel()))
    places = values.abs().topk(count, sorted=False).indices
    row = torch.cat([places.to(torch.int32), values[places].view(torch.int32)]).unsqueeze(0)
    gathered = yield allgather_async(row, name=f"{name}.top", process_set=process_set)
    _refuse_joined(len(gathered), members.size, name)
    mean = torch.zeros_like(values)
    for theirs in gathered:
        mean[theirs[:count].long()] += theirs[count:].contiguous().view(torch.float32)
    residual = values.clone()
    residual[places] = 0
    return Mean(mean / members.size, _finite(residual))


def low_rank(
    values: torch.Tensor, shapes: Sequence[tuple[int, int]], factors: list[torch.Tensor | None], name: str, process_set: ProcessSet | None
) -> Steps:
    """PowerSGD. ``values``: float32, one dimension, the tensors one after the other.

    Args:
        shapes: rows and columns of each tensor as a matrix, which travels as two factors; (elements, 0): it travels whole.
        factors: of each matrix the right one, (columns, rank), the same on all ranks: from the last step, and overwritten with that of this
            step; None for the others.
    """
    parts = values.split([rows * max(columns, 1) for rows, columns in shapes])
    matrices = {n: part.view(shape) for n, (part, shape) in enumerate(zip(parts, shapes)) if shape[1]}
    lefts = {n: matrix @ factors[n] for n, matrix in matrices.items()}
    first = [lefts.get(n, part) for n, part in enumerate(parts)]
    flat = torch.cat([*(part.reshape(-1) for part in first), values.new_ones(1)])  # behind them the number of ranks that take part
    flat = yield allreduce_async_(flat, name=f"{name}.left", op=Sum, process_set=process_set)
    size = members_of(process_set).size
    _refuse_joined(int(flat[-1]), size, name)
    flat = flat[:-1] / size
    means = [part.view(like.shape) for part, like in zip(flat.split([part.numel() for part in first]), first)]
    bases = {n: _orthonormal(means[n]) for n in matrices}
    rights = [matrix.t() @ bases[n] for n, matrix in matrices.items()]
    if rights:
        flat = torch.cat([right.reshape(-1) for right in rights])
        flat = yield allreduce_async_(flat, name=f"{name}.right", op=Average, process_set=process_set)
    for n, right in zip(matrices, flat.split([right.numel() for right in rights]) if rights else ()):
        factor = right.view(-1, bases[n].shape[1])
        means[n] = _product(bases[n], factor)
        # A column that is lost, because there was no gradient or an infinite one, would never come back.
        usable = torch.isfinite(factor).all(0) & (factor != 0).any(0)
        factors[n] = torch.where(usable, factor, factors[n])
    mean = torch.cat([part.reshape(-1) for part in means])
    residual = values - mean
    for part, shape in zip(residual.split([part.numel() for part in parts]), shapes):
        if not shape[1]:
            part.zero_()
    return Mean(mean, _finite(residual))


def _refuse_joined(active: int, size: int, name: str) -> None:
    if active != size:
        text = f"{name}: a rank has joined (hvd.join), and a compressed mean needs all: give every rank as many steps, as ShardSampler does"
        raise CollectiveError(text, "invalid")


def _finite(residual: torch.Tensor) -> torch.Tensor:
    """Of a step with infinite gradients, which a GradScaler leaves out, nothing is to remain."""
    return residual.nan_to_num_(0.0, 0.0, 0.0)


# Ranks whose processors differ must get the same bits of the same numbers: a library's matrix product and sum are as wide as the
# processor's registers, so what all ranks calculate for themselves is made of operations on single elements, and of sums of integers.

#: Products of numbers of at most 1 are summed as multiples of 1 / FRACTION: of a million of them no sum overflows.
FRACTION = float(1 << 40)


def _dots(columns: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    products = (columns * column.unsqueeze(1) * FRACTION).round().to(torch.int64)
    return products.sum(0).to(torch.float64) / FRACTION


def _orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """Gram-Schmidt, twice; columns that depend on others, to rounding, become 0."""
    if not torch.isfinite(columns).all():
        return torch.full_like(columns, float("nan"))
    basis = columns.double()
    for k in range(basis.shape[1]):
        column = basis[:, k]
        column = column / column.abs().max().clamp_min(1e-300)  # of zeros nothing is left
        for _ in range(2):
            for number, dot in enumerate(_dots(basis[:, :k], column)):
                column = column - dot * basis[:, number]
        rest = column.abs().max()
        column = column / rest if rest > 1e-6 else torch.zeros_like(column)
        basis[:, k] = column / _dots(column.unsqueeze(1), column).sqrt().clamp_min(1.0)
    return basis.to(columns.dtype)


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """``left @ right.t()``."""
    total = torch.zeros(len(left), len(right), dtype=left.dtype, device=left.device)
    for k in range(left.shape[1]):
        total += torch.outer(left[:, k], right[:, k])
    return total
