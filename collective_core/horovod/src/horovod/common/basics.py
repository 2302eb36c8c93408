"""The object whose methods are the functions of ``horovod.torch``."""

from __future__ import annotations

import importlib
from typing import Any


class HorovodBasics:
    """Every name of ``collective_core.torch``; of ``collective_core.tensorflow`` where the path says so. An underscore may precede names.

    The other arguments, a library that was built for a framework, mean nothing here.
    """

    def __init__(self, pkg_path: str = "", *_: Any) -> None:
        self._module = "collective_core.tensorflow" if "tensorflow" in pkg_path else "collective_core.torch"

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._module), name.lstrip("_"))
