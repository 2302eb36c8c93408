"""When nothing fits: the host that blocks, the constraint, and the two cheapest ways out."""

from __future__ import annotations

from collections.abc import Sequence

from provision.plan import Conflict

WAYS_OUT = 2  # as many are shown: the cheapest


class Blocked(Exception):
    """Raised inside the resolver when nothing fits; carries the conflict. ``ways_out`` are in the order of what they cost."""

    def __init__(self, host: str, constraint: str, *ways_out: str) -> None:
        super().__init__(constraint)
        self.conflict = Conflict(host, constraint, ways_out[:WAYS_OUT])


def leave_out(names: Sequence[str]) -> str:
    """The way out that always works: without these hosts."""
    limit = ",".join(f"!{name}" for name in names)
    if len(names) > 3:
        return f"leave {some(names)} out: take them off the inventory, or --limit"
    return f"leave {some(names)} out: --limit '{limit}'"


def some(names: Sequence[str]) -> str:
    """``a``, ``a, b and c``, or ``a, b and 48 more``."""
    if len(names) > 3:
        return f"{names[0]}, {names[1]} and {len(names) - 2} more"
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]
