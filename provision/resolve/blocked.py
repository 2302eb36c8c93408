"""When nothing fits: the host that blocks, what is wrong, and what could be done about it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from provision import catalog
from provision.base.problems import Problem, Remedy
from provision.base.text import joined
from provision.base.versions import key
from provision.plan.requirements import Requirements
from provision.resolve.machine import Interpreter, Machine, driver_for

Kinds = Mapping[Machine, list[str]]


@dataclass(frozen=True)
class Attempt(Remedy):
    """A remedy that can be tried before it is offered.

    Attributes:
        then: what the resolver is asked afterwards; None where nobody can say.
        sort: of several of one sort the first that works is enough.
        without: the hosts that it leaves out.
        asks: the fields of ``Requirements`` that it changes.
    """

    then: Callable[[Kinds, Requirements], tuple[Kinds, Requirements]] | None = None
    sort: str = ""
    without: tuple[str, ...] = ()
    asks: tuple[str, ...] = ()

    def remedy(self, more: str = "") -> Remedy:
        """What the user is told, with ``more`` to add."""
        return Remedy(self.text + more, self.about)


class Blocked(Exception):
    """Raised inside the resolver when nothing fits: the host that blocks, what is wrong, and ``attempts`` in the order of what they cost,
    read once."""

    def __init__(self, host: str, what: str, attempts: Iterable[Attempt]) -> None:
        super().__init__(what)
        self.host, self.what, self.attempts = host, what, attempts

    def problem(self, remedies: tuple[Remedy, ...]) -> Problem:
        """What is wrong, with the remedies that work."""
        return Problem("error", self.what, host=self.host, remedies=remedies)


def ask(text: str, **requirements: Any) -> Attempt:
    """Ask for something else: the fields of ``Requirements`` that change."""
    return Attempt(text, "options", lambda kinds, asked: (kinds, replace(asked, **requirements)), asks=tuple(requirements))


def leave_out(names: Sequence[str]) -> Attempt:
    """Go on without these hosts."""
    limit = ",".join(f"!{name}" for name in names)
    how = "take them off the inventory, or --limit" if len(names) > 3 else f"--limit '{limit}'"
    text = f"leave {joined(names)} out: {how}"
    return Attempt(text, then=lambda kinds, asked: (remaining(kinds, names), asked), without=tuple(names))


def remaining(kinds: Kinds, gone: Collection[str]) -> Kinds:
    """The kinds of host that are left without the hosts in ``gone``."""
    left = {kind: [name for name in names if name not in gone] for kind, names in kinds.items()}
    return {kind: names for kind, names in left.items() if names}


def become(text: str, change: Callable[[Machine], Machine], sort: str = "") -> Attempt:
    """Change hosts: every kind becomes what ``change`` makes of it."""

    def then(kinds: Kinds, asked: Requirements) -> tuple[Kinds, Requirements]:
        changed: dict[Machine, list[str]] = {}
        for kind, names in kinds.items():
            changed.setdefault(change(kind), []).extend(names)
        return changed, asked

    return Attempt(text, then=then, sort=sort)


def instead(before: Machine, after: Machine) -> Callable[[Machine], Machine]:
    """For `become`: this kind of host alone changes."""
    return lambda kind: after if kind == before else kind


def newer_drivers(kind: Machine, names: Sequence[str]) -> Iterator[Attempt]:
    """Every newer driver for this kind of host, the oldest first."""
    for cuda in sorted(catalog.cuda().toolkits.drivers, key=key):
        if kind.cuda is None or key(cuda) > key(kind.cuda):
            text = f"update the NVIDIA driver of {joined(names)} to {driver_for(cuda)} or newer (CUDA {cuda})"
            yield become(text, instead(kind, replace(kind, cuda=cuda, driver=driver_for(cuda), too_old=False)), "driver")


def other_pythons(kind: Machine, names: Sequence[str], versions: Collection[str]) -> Iterator[Attempt]:
    """Every one of these Pythons for this kind of host, the newest first."""
    for version in sorted(versions, key=key, reverse=True):
        path = f"/usr/bin/python{version}"
        text = f"install Python {version} on {joined(names)} and name it in the inventory: provision_python={path}"
        yield become(text, instead(kind, replace(kind, python=Interpreter(version, path), others=())), "python")
