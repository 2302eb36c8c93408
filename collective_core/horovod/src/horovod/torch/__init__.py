"""``import horovod.torch as hvd``."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import collective_core.torch as _engine
from collective_core.torch.mpi_ops import *  # noqa: F403
from horovod.torch import mpi_ops as mpi_ops

if TYPE_CHECKING:
    from collective_core.torch import *  # noqa: F403

__all__ = _engine.__all__


def __getattr__(name: str) -> Any:
    """What is imported when it is asked for."""
    return import_module(f"{__name__}.elastic") if name == "elastic" else getattr(_engine, name)


def __dir__() -> list[str]:
    return dir(_engine)
