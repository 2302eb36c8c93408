"""Which hosts of a job run how many ranks. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from provision.base.errors import UsageError
from provision.base.text import counted
from provision.launch.launchers import RunOptions

Placement = list[tuple[str, int]]  # (address, ranks) of each host that takes part


def of_program(hosts: Sequence[tuple[str, int]], options: RunOptions) -> Placement:
    """Where a user's program runs; see `fill`. An elastic job may use every host that is there: its launcher starts what it needs."""
    np = None if options.elastic else options.np
    return fill(hosts, np, oversubscribe=options.oversubscribe, nodes=options.nodes, per_node=options.per_node)


def fill(
    hosts: Sequence[tuple[str, int]], np: int | None, *, oversubscribe: bool = False, nodes: int | None = None, per_node: int | None = None
) -> Placement:
    """Place ``np`` ranks (None: one per slot) so that each host's slots are filled before the next host's.

    Args:
        hosts: (address, slots).
        oversubscribe: allow more ranks than slots; all hosts take part then.
        nodes: only the first so many hosts.
        per_node: on each host so many ranks, also where it has one slot only.

    Raises:
        UsageError: there are fewer slots, and not ``oversubscribe``; or fewer hosts.
    """
    if nodes is not None and nodes > len(hosts):
        raise UsageError(f"--nnodes {nodes}: only {counted(len(hosts), 'host')}", hint="name more of them: --hosts hosts.ini, or -H a,b")
    hosts = hosts[:nodes]
    if per_node is not None:
        for address, count in hosts:
            if 1 < count < per_node and not oversubscribe:  # one slot is what a host has by default
                hint = "start fewer, give it more slots (`slots` in the inventory, -H a:8), or allow it: --oversubscribe"
                raise UsageError(f"{per_node} ranks do not fit into the {count} slots of {address}", hint=hint)
        hosts = [(address, per_node) for address, _ in hosts]
    slots = sum(count for _, count in hosts)
    left = slots if np is None else np
    if left > slots and oversubscribe:
        return spread(hosts, left, oversubscribe=True)
    _refuse_more_than_slots(hosts, left)
    placed = []
    for address, count in hosts:
        if left > 0:
            placed.append((address, min(count, left)))
            left -= count
    return placed


def spread(hosts: Sequence[tuple[str, int]], np: int, *, oversubscribe: bool = False) -> Placement:
    """Place ``np`` ranks one by one in turn, so that every host takes part.

    A host gets no more than its slots while another one has a free slot; further ranks are spread over all of them.

    Raises:
        UsageError: fewer ranks than hosts, or more than slots and not ``oversubscribe``.
    """
    if not oversubscribe:
        _refuse_more_than_slots(hosts, np)
    if np < len(hosts):
        hint = f"give at least --np {len(hosts)}, or list fewer hosts"
        raise UsageError(f"{counted(np, 'rank')} cannot take part on all {len(hosts)} hosts", hint=hint)
    taken = [0] * len(hosts)
    left = np
    while left:
        free = [at for at, (_, slots) in enumerate(hosts) if taken[at] < slots] or list(range(len(hosts)))
        for at in free[:left]:
            taken[at] += 1
        left -= min(left, len(free))
    return [(address, count) for (address, _), count in zip(hosts, taken, strict=True)]


def _refuse_more_than_slots(hosts: Sequence[tuple[str, int]], np: int) -> None:
    slots = sum(count for _, count in hosts)
    if np > slots:
        hint = "start fewer, give the hosts more slots (`slots` in the inventory, -H a:8), or allow it: --oversubscribe"
        raise UsageError(f"{counted(np, 'rank')}, but {counted(len(hosts), 'host')} with {counted(slots, 'slot')}", hint=hint)
