"""Open MPI from its sources: who can build it, and with which CUDA toolkit. Hosts like those get what was built."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from provision.plan.model import Builder
from provision.resolve import toolkits
from provision.resolve.blocked import Kinds
from provision.resolve.machine import Machine

# As many hosts are named: one builds, and the next steps in where it cannot.
_FEW = 8


def builders(kinds: Kinds, cuda: str | None) -> dict[Machine, tuple[Builder, ...]]:
    """For every kind of host a few that can build it; empty where all can, or nobody (see `lacking`).

    Args:
        cuda: the CUDA whose GPU memory is to be supported where there are GPUs; None without.
    """
    found = {}
    for sharing in _shares(kinds, cuda):
        able = {kind: how for kind in sharing if (how := _able(kind, cuda))}
        listed = [Builder(name, *how) for kind, how in able.items() for name in sharing[kind][:_FEW]]
        listed.sort(key=lambda each: (each.why == toolkits.UNKNOWN, each.host))
        everyone = able.keys() == sharing.keys() and not any(each.toolkit for each in listed)
        found.update(dict.fromkeys(sharing, () if everyone else tuple(listed[:_FEW])))
    return found


def lacking(kinds: Kinds, cuda: str | None) -> tuple[list[str], list[str]]:
    """(hosts without make, hosts with GPUs and without a CUDA toolkit) of those that nobody can build it for."""
    unable = {
        kind: names for sharing in _shares(kinds, cuda) if not any(_able(kind, cuda) for kind in sharing) for kind, names in sharing.items()
    }
    without_make = sorted(name for kind, names in unable.items() if not kind.make for name in names)
    return without_make, sorted(name for kind, names in unable.items() if kind.make for name in names)


def _shares(kinds: Kinds, cuda: str | None) -> Iterator[Kinds]:
    """Kinds of host that get the same build. What a login without root has built does not go where root would install it."""
    found: dict[Hashable, dict[Machine, list[str]]] = {}
    for kind, names in kinds.items():
        found.setdefault((kind.system, kind.arch, kind.root, cuda and kind.cuda is not None), {})[kind] = names
    yield from found.values()


def _able(kind: Machine, cuda: str | None) -> tuple[str | None, str] | None:
    """(folder of the CUDA toolkit, why that one) with which a kind of host can build it; None where it cannot."""
    if not kind.make:
        return None
    if cuda is None or kind.cuda is None:
        return None, ""
    found = toolkits.for_headers(kind, cuda)
    return (found[0].path, found[1]) if found else None
