"""When nothing fits: the host that blocks, the constraint, and what could be done about it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from provision import catalog
from provision.base.text import some
from provision.base.versions import key
from provision.plan.model import Remedy
from provision.plan.requirements import Requirements
from provision.resolve.machine import Interpreter, Machine, driver_for

Kinds = Mapping[Machine, list[str]]


@dataclass(frozen=True)
class Way:
    """A way out of a conflict.

    Attributes:
        text: what to do.
        then: what the resolver is asked afterwards, so that it can be tried; None where nobody can say.
        sort: of several ways of one sort the first that works is enough.
        without: the hosts that it leaves out.
        asks: the fields of ``Requirements`` that it changes.
    """

    text: str
    then: Callable[[Kinds, Requirements], tuple[Kinds, Requirements]] | None = None
    sort: str = ""
    without: tuple[str, ...] = ()
    asks: tuple[str, ...] = ()

    def remedy(self, more: str = "") -> Remedy:
        """What the user is told, with ``more`` to add."""
        return Remedy(self.text + more, "options" if self.asks else "hosts")


class Blocked(Exception):
    """Raised inside the resolver when nothing fits. ``ways`` are in the order of what they cost, and read once."""

    def __init__(self, host: str, constraint: str, ways: Iterable[Way]) -> None:
        super().__init__(constraint)
        self.host, self.constraint, self.ways = host, constraint, ways


def ask(text: str, **requirements: Any) -> Way:
    """Ask for something else: the fields of ``Requirements`` that change."""
    return Way(text, lambda kinds, asked: (kinds, replace(asked, **requirements)), asks=tuple(requirements))


def leave_out(names: Sequence[str]) -> Way:
    """Go on without these hosts."""
    limit = ",".join(f"!{name}" for name in names)
    how = "take them off the inventory, or --limit" if len(names) > 3 else f"--limit '{limit}'"
    return Way(f"leave {some(names)} out: {how}", lambda kinds, asked: (remaining(kinds, names), asked), without=tuple(names))


def remaining(kinds: Kinds, gone: Collection[str]) -> Kinds:
    """The kinds of host that are left without the hosts in ``gone``."""
    left = {kind: [name for name in names if name not in gone] for kind, names in kinds.items()}
    return {kind: names for kind, names in left.items() if names}


def become(text: str, change: Callable[[Machine], Machine], sort: str = "") -> Way:
    """Change hosts: every kind becomes what ``change`` makes of it."""

    def then(kinds: Kinds, asked: Requirements) -> tuple[Kinds, Requirements]:
        changed: dict[Machine, list[str]] = {}
        for kind, names in kinds.items():
            changed.setdefault(change(kind), []).extend(names)
        return changed, asked

    return Way(text, then, sort)


def instead(before: Machine, after: Machine) -> Callable[[Machine], Machine]:
    """For `become`: this kind of host alone changes."""
    return lambda kind: after if kind == before else kind


def newer_drivers(kind: Machine, names: Sequence[str]) -> Iterator[Way]:
    """Every newer driver for this kind of host, the oldest first."""
    for cuda in sorted(catalog.load("cuda")["toolkits"]["drivers"], key=key):
        if kind.cuda is None or key(cuda) > key(kind.cuda):
            text = f"update the NVIDIA driver of {some(names)} to {driver_for(cuda)} or newer (CUDA {cuda})"
            yield become(text, instead(kind, replace(kind, cuda=cuda, driver=driver_for(cuda), too_old=False)), "driver")


def other_pythons(kind: Machine, names: Sequence[str], versions: Collection[str]) -> Iterator[Way]:
    """Every one of these Pythons for this kind of host, the newest first."""
    for version in sorted(versions, key=key, reverse=True):
        path = f"/usr/bin/python{version}"
        text = f"install Python {version} on {some(names)} and name it in the inventory: provision_python={path}"
        yield become(text, instead(kind, replace(kind, python=Interpreter(version, path), others=())), "python")
