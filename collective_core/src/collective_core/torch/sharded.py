"""Parameters and tensors that are a rank's part of a larger whole, known by their attribute ``collective_shard``: nobody may broadcast
them, sum them over ranks or copy them as if they were equal on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Iterable, Mapping, Protocol, Sequence

import torch

from collective_core.errors import InvalidUseError
from collective_core.runtime.process_sets import ProcessSet


class Shard(Protocol):
    """Keeper of a sharded parameter: its attribute ``collective_shard``. extensions/sparse/table.py says what each does."""

    name: str
    process_set: ProcessSet | None

    def ranks(self) -> int: ...
    def send_gradients(self, blocking: bool) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]: ...
    def update(self, positions: torch.Tensor, gradients: torch.Tensor, divisor: int, lr: float) -> None: ...
    def drop_gradients(self) -> None: ...
    def describe_rows(self) -> dict[str, Any]: ...
    def mismatch(self, key: str, written: dict[str, Any]) -> str: ...
    def save_rows(self, shards: Mapping[str, Any], path: Path) -> dict[str, Any]: ...
    def load_rows(self, shards: Mapping[str, Any], written: dict[str, Any], path: Path, writer: int) -> None: ...
    def begin_from(self, steps: int) -> None: ...


def is_shard(tensor: Any) -> bool:
    """Whether it is a part of a larger whole."""
    return getattr(tensor, "collective_shard", None) is not None


def require_shard(shard: Any, what: str) -> None:
    """Raises :class:`CollectiveError` (kind ``invalid``) where ``shard``, which is that of ``what``, does not do what is asked of one."""
    asked = [*Shard.__annotations__, *(name for name in vars(Shard) if not name.startswith("_"))]
    missing = [name for name in asked if not hasattr(shard, name)]
    if missing:
        text = f"the attribute collective_shard of {what}, of type {type(shard).__name__}, has no {', '.join(missing)}"
        raise InvalidUseError(f"{text}, which collective_core.torch.sharded.Shard asks for", "invalid")


def shards_in(groups: Iterable[dict[str, Any]]) -> list[tuple[Shard, float]]:
    """What looks after the sharded ones among an optimizer's parameters, with the learning rates of their groups."""
    parameters = [(p, float(group.get("lr", 0.0))) for group in groups for p in group["params"]]
    return [(p.collective_shard, lr) for p, lr in parameters if is_shard(p)]


def step_all(shards: Sequence[tuple[Shard, float]], divisor: int) -> None:
    """Brings all waiting gradients to their rows and applies them. Collective; all transfers are started before the first is waited for.

    ``shards``: with the learning rate for each whose optimizer has none of its own. ``divisor``: of the sums over ranks.
    """
    received = [shard.send_gradients(blocking=len(shards) == 1) for shard, _ in shards]
    for (shard, lr), receive in zip(shards, received):
        shard.update(*receive(), divisor, lr)
