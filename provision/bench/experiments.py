"""Which measurements show what a cluster can do. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

Kind = Literal["pair", "ranks", "training"]


@dataclass(frozen=True)
class Experiment:
    """One run: host → ranks, in order. A ``pair`` has one rank on each of two hosts."""

    kind: Kind
    placed: tuple[tuple[str, int], ...]

    @property
    def ranks(self) -> int:
        return sum(count for _, count in self.placed)

    @property
    def title(self) -> str:
        """For people."""
        hosts = [name for name, _ in self.placed]
        if self.kind == "pair":
            return f"{hosts[0]} and {hosts[1]}"
        what = "training steps" if self.kind == "training" else "sums"
        return f"{what} of {self.ranks} rank{'s' if self.ranks > 1 else ''} on {len(hosts)} host{'s' if len(hosts) > 1 else ''}"


def of(slots: Sequence[tuple[str, int]], *, pairs: bool, training: bool) -> list[Experiment]:
    """The measurements for hosts with so many slots each: every pair of hosts, then 1, 2, 4 … and all ranks."""
    found = []
    if pairs:
        found += [Experiment("pair", ((one, 1), (other, 1))) for one, other in combinations([name for name, _ in slots], 2)]
    for ranks in counts(sum(count for _, count in slots)):
        if ranks > 1:
            found.append(Experiment("ranks", filled(slots, ranks)))
        if training:
            found.append(Experiment("training", filled(slots, ranks)))
    return found


def counts(most: int) -> list[int]:
    """1, 2, 4 … and ``most``."""
    found = []
    number = 1
    while number < most:
        found.append(number)
        number *= 2
    return [*found, most]


def filled(slots: Sequence[tuple[str, int]], ranks: int) -> tuple[tuple[str, int], ...]:
    """The hosts' ranks, each host filled before the next."""
    placed = []
    for name, count in slots:
        here = min(count, ranks)
        if here:
            placed.append((name, here))
        ranks -= here
    return tuple(placed)
