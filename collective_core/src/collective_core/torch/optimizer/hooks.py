"""Hooks that tell when a parameter's gradient is ready, in every PyTorch."""

from __future__ import annotations

from typing import Any, Callable

import torch


def on_gradient(parameter: torch.nn.Parameter, ready: Callable[[torch.nn.Parameter], None]) -> Callable[[], None]:
    """Calls ``ready`` each time after a gradient was accumulated into the parameter, while the caller keeps the result, which ends it."""
    if hasattr(parameter, "register_post_accumulate_grad_hook"):
        hook: Any = parameter.register_post_accumulate_grad_hook(ready)
        return lambda: hook.remove()
    # Before PyTorch 2.1: the parameter's accumulation node, which is found behind any view of it and lives as long as somebody holds it.
    node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
    hook = node.register_hook(lambda *_: ready(parameter))

    def end(_node: Any = node) -> None:
        hook.remove()

    return end
