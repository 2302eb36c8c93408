"""The names under which an optimizer's gradients travel, and whether they travel at all."""

from __future__ import annotations

from typing import Callable, Iterable
from weakref import WeakMethod

import torch

from collective_core.runtime.process_sets import ProcessSet, members_of

#: Optimizers made so far, in order: kind and process set, and what has one let go of its parameters, if it is still there.
_made: list[tuple[tuple[str, int], WeakMethod[Callable[[], None]]]] = []


def is_alone(process_set: ProcessSet | None) -> bool:
    """Whether there is nobody to reduce gradients with: one rank, or, as in Horovod, a rank that is not in the set."""
    outside = process_set is not None and process_set.included() is False
    return outside or members_of(process_set).size == 1


def number_of_optimizer(kind: str, process_set: ProcessSet | None, revoke: Callable[[], None]) -> str:
    """The beginning of names that no other optimizer's tensors have. Ranks make their optimizers of a process set in one order.

    ``revoke``: a method of what listens to the parameters, for :func:`forget_made_after`.
    """
    key = (kind, (process_set.process_set_id if process_set is not None else 0) or 0)
    _made.append((key, WeakMethod(revoke)))
    return f"{kind}.{sum(other == key for other, _ in _made)}"


def made() -> int:
    """How many optimizers there have been."""
    return len(_made)


def forget_made_after(number: int) -> None:
    """Numbers the next optimizers as if there had been only so many, and revokes the others' parameters.

    For a function that elastic ranks call again: it makes its optimizers anew, and on a rank that is new for the first time.
    """
    for _, reference in _made[number:]:
        revoke = reference()
        if revoke is not None:
            revoke()
    del _made[number:]


def names_of(
    parameters: list[torch.nn.Parameter], named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None
) -> dict[torch.nn.Parameter, str]:
    """Every parameter's name. Raises ValueError, as Horovod does, for duplicate or missing names."""
    if named_parameters is None:
        return {p: f"gradient.{i}" for i, p in enumerate(parameters)}
    named = list(named_parameters)
    if any(not isinstance(pair, tuple) for pair in named):
        raise ValueError("named_parameters should be a sequence of tuples (name, parameter), usually produced by model.named_parameters().")
    seen: dict[str, int] = {}
    for name, _ in named:
        seen[name] = seen.get(name, 0) + 1
    duplicates = sorted(name for name, times in seen.items() if times > 1)
    if duplicates:
        raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(duplicates)}")
    names = {p: name for name, p in named}
    if any(p not in names for p in parameters):
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named. "
            "Python object ids: " + ", ".join(str(id(p)) for p in parameters if p not in names)
        )
    return names
