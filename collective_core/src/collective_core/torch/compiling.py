"""Code that torch.compile and compiled autograd do not enter: locks, foreign memory and other ranks are nothing that they can trace."""

from __future__ import annotations

import functools
import inspect
from typing import Any, Callable, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def _never() -> bool:
    return False


#: Whether a compiler traces the caller, which replaces the call by its answer; without one it costs a third of ``is_compiling``, at every
#: collective and every gradient. Before PyTorch 2.1 none can be told what not to trace.
is_traced: Callable[[], bool] = getattr(getattr(torch, "compiler", None), "is_dynamo_compiling", _never)


def untraced(kind: type) -> type:
    """The class, whose methods a compiler runs as they are where PyTorch's C++ calls them: DDP's reducer, in a compiled forward pass."""
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if hasattr(frames, "set_code_exec_strategy"):  # before, compilers ran what they could not trace
        skip = frames._FrameAction.SKIP
        for method in filter(inspect.isfunction, vars(kind).values()):
            frames.set_code_exec_strategy(method.__code__, frames._FrameExecStrategy(skip, skip))
    return kind


def not_compiled(function: F) -> F:
    """The function, which a compiler calls as it is, between what it compiles.

    ``torch.compiler.disable`` alone would load the compiler, which takes seconds, and make every call dearer.
    """

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if is_traced():
            return torch.compiler.disable(function)(*args, **options)
        return function(*args, **options)

    return call  # type: ignore[return-value]
