"""Horovod's names for collective_core: scripts written for Horovod run with no line changed. Nothing is done here but renaming.

What differs from the engine itself is one setting, which importing this chooses unless it is set already: COLLECTIVE_SEMANTICS=horovod.
"""

from __future__ import annotations

import os as _os
from importlib import metadata as _metadata

try:
    _other = _metadata.version("horovod")
except _metadata.PackageNotFoundError:
    pass
else:
    raise ImportError(
        f"Horovod {_other} and collective-core-horovod are both installed, and have overwritten each other's files: "
        "pip uninstall horovod collective-core-horovod, then install the one that you want"
    )

if not _os.environ.get("COLLECTIVE_SEMANTICS"):
    _os.environ["COLLECTIVE_SEMANTICS"] = "horovod"  # which init() reads

from horovod import _missing  # noqa: F401 - what it does
from horovod.runner import run
from horovod.version import __version__

__all__ = ["__version__", "run"]
