"""The mark of tensors that are a rank's part of a larger whole: nobody may broadcast them, sum them over ranks or copy them as if they were
equal on all ranks."""

from __future__ import annotations

from typing import Any

import torch

_MARK = "collective_core_shard"


class ShardParameter(torch.nn.Parameter):
    """A parameter of which every rank holds other rows or columns. ``table``: what looks after it."""

    table: Any

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError(
            "a sharded table cannot be copied: a copy would belong to no optimizer. Make another one with the same arguments"
        )


def marked(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, which :func:`is_shard` knows from now on."""
    setattr(tensor, _MARK, True)
    return tensor


def is_shard(tensor: Any) -> bool:
    return isinstance(tensor, ShardParameter) or getattr(tensor, _MARK, False)
