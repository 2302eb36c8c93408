"""``horovod.run``: a function on several ranks."""

from __future__ import annotations

from typing import Any

from collective_core.launch import run as run


class _HorovodArgs:
    """The arguments of :func:`horovod.run` as attributes: None unless set. ``run_func`` or ``command`` is what runs."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None
