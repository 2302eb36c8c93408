"""GradScaler beside a DistributedOptimizer: it looks for infinities in reduced gradients, so that all ranks take or skip a step together.

It looks before it calls the optimizer, if it calls it at all, and PyTorch has no hook for that moment. But it asks the optimizer for its
parameters then, whatever stands between the two: :func:`call_of_scaler` finds it among the callers, PyTorch's own class, too, which
programs for Horovod use.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch

_Base: Any = torch.amp.GradScaler if hasattr(torch.amp, "GradScaler") else torch.cuda.amp.GradScaler  # before PyTorch 2.3


class GradScaler(_Base):
    """PyTorch's ``torch.amp.GradScaler``, by the name under which programs look for it here; its device is a GPU where there is one.

    With a ``DistributedOptimizer`` gradients are reduced before ``unscale_`` or ``step`` looks for infinities among them, so all ranks take
    or skip a step, and their scales stay the same. Raises :class:`CollectiveError` where ``skip_synchronize()`` forbids that and
    ``optimizer.synchronize()`` has not been called.
    """

    def __init__(self, device: str | None = None, **options: Any) -> None:
        if _Base is getattr(torch.amp, "GradScaler", None):
            options["device"] = device or ("cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(**options)


def call_of_scaler(method: str) -> FrameType | None:
    """The outermost call of a GradScaler's method that has led here. A compiler, which runs it in pieces, has ``method`` in their names."""
    found, caller = None, sys._getframe(1).f_back
    while caller is not None:
        if method in caller.f_code.co_name and isinstance(caller.f_locals.get("self"), _Base):
            found = caller
        caller = caller.f_back
    return found
