"""Optional parts by their names: attributes of modules that are imported when somebody asks for them, and extensions."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any, Callable, Mapping


def extension(name: str) -> Any:
    """The module of an optional part that the program has chosen."""
    return import_module(f"collective_core.extensions.{name}")


def attributes(module: str, places: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A module's ``__getattr__`` and ``__dir__`` (PEP 562). ``places``: by name, the module to import, or ``module:attribute``."""

    def get(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        place, _, attribute = places[name].partition(":")
        value: Any = import_module(place)
        value = getattr(value, attribute) if attribute else value
        setattr(sys.modules[module], name, value)
        return value

    return get, lambda: sorted({*vars(sys.modules[module]), *places})
