"""The names of an optimizer's parameters, under which their gradients travel."""

from __future__ import annotations

from typing import Iterable

import torch


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
