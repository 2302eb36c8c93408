"""Parameters and tensors that are a rank's part of a larger whole, known by their attribute ``collective_shard``: nobody may broadcast
them, sum them over ranks or copy them as if they were equal on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Iterable, Mapping, Protocol, Sequence

import torch

from collective_core.runtime.process_sets import ProcessSet


class Shard(Protocol):
    """What looks after a sharded parameter: its attribute ``collective_shard``."""

    name: str
    process_set: ProcessSet | None

    def send_gradients(self, blocking: bool) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        """Starts what brings gradients that wait to the ranks that hold their rows, which it returns. Collective."""

    def update(self, positions: torch.Tensor, gradients: torch.Tensor, divisor: int, lr: float) -> None:
        """Applies gradients; their sums are divided by ``divisor``."""

    def drop_gradients(self) -> None:
        """Forgets gradients that wait for a step."""

    def ranks(self) -> int:
        """Over how many it is divided."""

    def describe_rows(self) -> dict[str, Any]:
        """What a checkpoint's header says of it, in plain values."""

    def mismatch(self, key: str, written: dict[str, Any]) -> str:
        """Why it cannot be what has ``written`` that; empty if it can."""

    def save_rows(self, shards: Mapping[str, Any], path: Path) -> dict[str, Any]:
        """Writes this rank's rows of all these shards, of which this is one, into a file; returns its ``bytes`` and ``sha256``."""

    def load_rows(self, shards: Mapping[str, Any], written: dict[str, Any], path: Path, writer: int) -> None:
        """Has all these shards, which :meth:`describe_rows` had described as ``written``, take what they have of the file of rank
        ``writer``. Raises ValueError where it does not hold what it should."""

    def begin_from(self, steps: int) -> None:
        """After the rows were loaded: so many steps led to them."""


def is_shard(tensor: Any) -> bool:
    """Whether it is a part of a larger whole."""
    return getattr(tensor, "collective_shard", None) is not None


def shards_in(groups: Iterable[dict[str, Any]]) -> list[tuple[Shard, float]]:
    """What looks after the sharded ones among an optimizer's parameters, with the learning rates of their groups."""
    parameters = [(p, float(group.get("lr", 0.0))) for group in groups for p in group["params"]]
    return [(p.collective_shard, lr) for p, lr in parameters if is_shard(p)]


def step_all(shards: Sequence[tuple[Shard, float]], divisor: int) -> None:
    """Brings all waiting gradients to their rows and applies them. Collective; all transfers are started before the first is waited for.

    Args:
        shards: and the learning rate for each whose optimizer has none of its own.
        divisor: of the sums over ranks.
    """
    received = [shard.send_gradients(blocking=len(shards) == 1) for shard, _ in shards]
    for (shard, lr), receive in zip(shards, received):
        shard.update(*receive(), divisor, lr)
