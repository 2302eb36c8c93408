"""Check of what must be installed for the interface of a framework: said at once, and not by whatever fails first."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any


def require(package: str, title: str, oldest: tuple[int, ...], install: str) -> Any:
    """The package of a framework. Raises ImportError, with the command ``install``, where it is missing or older than ``oldest``."""
    wanted = f"collective_core.{package} needs {title} {'.'.join(map(str, oldest))} or newer: {install}"
    try:
        imported = import_module(package)
    except ImportError as error:
        raise ImportError(f"{wanted}; importing {package} failed: {error}") from error
    version = str(getattr(imported, "__version__", ""))
    if tuple(map(int, re.findall(r"\d+", version)[: len(oldest)])) < oldest:
        raise ImportError(f"{wanted}; installed is {version or 'one without a version'}")
    return imported
