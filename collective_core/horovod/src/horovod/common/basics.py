"""The object whose methods are the functions of ``horovod.torch``."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any


class HorovodBasics:
    """Every name of ``collective_core.torch``; of ``collective_core.tensorflow`` where the path says so. An underscore may precede names.

    The other arguments, a library that was built for a framework, mean nothing here.
    """

    def __init__(self, pkg_path: str = "", *_: Any) -> None:
        framework = "tensorflow" if Path(pkg_path).parent.name == "tensorflow" else "torch"
        self._module = f"collective_core.{framework}"

    def __getattr__(self, name: str) -> Any:
        if name == "_module" or name.startswith("__"):  # of an object that is being copied
            raise AttributeError(name)
        return getattr(importlib.import_module(self._module), name.removeprefix("_"))
