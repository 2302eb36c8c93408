"""GradScaler beside a DistributedOptimizer: it looks for infinities in reduced gradients, so that all ranks take or skip a step together.

It looks before it calls the optimizer, if it calls it at all, and PyTorch has no hook for that moment: the two methods in which it does so
are wrapped, also of PyTorch's own class, which programs for Horovod use.
"""

from __future__ import annotations

import functools
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


#: Attribute of a method that is wrapped already.
_MARK = "_reduces_before_looking"


def reduce_before_looking() -> None:
    """Has every GradScaler ask an optimizer for what ``_reduce_for_scaler`` and ``_step_of_scaler`` do, where it has them."""
    own_unscale, own_step = _Base.unscale_, _Base.step
    if hasattr(own_step, _MARK):  # this package was imported anew in the same process
        return

    @functools.wraps(own_unscale)
    def unscale_(self: Any, optimizer: Any) -> None:
        if self.is_enabled() and hasattr(optimizer, "_reduce_for_scaler"):
            optimizer._reduce_for_scaler()
        own_unscale(self, optimizer)

    @functools.wraps(own_step)
    def step(self: Any, optimizer: Any, *args: Any, **options: Any) -> Any:
        if not self.is_enabled() or not hasattr(optimizer, "_step_of_scaler"):
            return own_step(self, optimizer, *args, **options)
        with optimizer._step_of_scaler():
            return own_step(self, optimizer, *args, **options)

    setattr(step, _MARK, True)
    _Base.unscale_, _Base.step = unscale_, step
