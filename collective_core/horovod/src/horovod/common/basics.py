"""The object whose methods are the functions of ``horovod.torch``."""

from __future__ import annotations

from typing import Any


class HorovodBasics:
    """Every name of ``collective_core.torch``. Its arguments, a library that was built for a framework, mean nothing here."""

    def __init__(self, *_: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        import collective_core.torch as hvd

        return getattr(hvd, name)
