"""GradScaler beside a DistributedOptimizer: it looks for infinities in reduced gradients, so that all ranks take or skip a step together.

It looks before it calls the optimizer, if it calls it at all, and PyTorch has no hook for that moment. But it asks the optimizer for its
parameters then, whatever stands between the two: :func:`call_of_scaler` finds it among the callers, PyTorch's own class, too, which
programs for Horovod use.
"""

from __future__ import annotations

import sys
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch

from collective_core.torch.compiling import is_traced

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
    if is_traced() and _is_traced_whole(method):
        return None
    found, caller = None, sys._getframe(1).f_back
    while caller is not None:
        if method in caller.f_code.co_name and isinstance(caller.f_locals.get("self"), _Base):
            found = caller
        caller = caller.f_back
    return found


def _is_traced_whole(method: str) -> bool:
    """Whether a compiler that must not stop (``fullgraph``) traces the caller, and no function with ``method`` in its name."""
    tracer = sys.modules["torch._dynamo.symbolic_convert"].InstructionTranslatorBase
    callers = [frame for frame, _ in walk_stack(None)]
    tracers = [caller.f_locals["self"] for caller in callers if isinstance(caller.f_locals.get("self"), tracer)]
    codes = [caller.f_code for caller in callers] + [tracer.f_code for tracer in tracers]
    return any(tracer.one_graph for tracer in tracers) and not any(method in code.co_name for code in codes)


# The compiler calls it while it traces, and takes its answer (``torch.compiler.assume_constant_result``, which would load the compiler).
_is_traced_whole._dynamo_marked_constant = True  # type: ignore[attr-defined]
