"""How gradients are grouped: fixed buckets, the same on all ranks, in the reverse order of the parameters.

Backward passes produce gradients roughly in that order, so the first bucket is complete early and its sum overlaps with the
rest of the pass. Buckets are launched strictly in order, whatever the order in which gradients arrive: that is what makes the
order of operations the same on all ranks without asking each other.
"""

from __future__ import annotations

from typing import Any, Sequence

import torch


class Bucket:
    """Gradients that are summed as one flat tensor in host memory."""

    def __init__(self, index: int, parameters: list[torch.nn.Parameter], dtype: torch.dtype) -> None:
        self.name = f"gradients.{index}"
        self.parameters = parameters
        self.dtype = dtype
        self.waiting = set(parameters)
        self.flat: torch.Tensor = torch.empty(0)
        self.contexts: dict[torch.nn.Parameter, Any] = {}
        self.handle = 0
        self.places: dict[torch.nn.Parameter, tuple[int, int]] = {}
        begin = 0
        for parameter in parameters:
            self.places[parameter] = (begin, begin + parameter.numel())
            begin += parameter.numel()
        self.elements = begin

    def slot(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """The parameter's part of the flat tensor, in the parameter's shape."""
        begin, end = self.places[parameter]
        return self.flat[begin:end].view(parameter.shape)

    def fill(self, parameter: torch.nn.Parameter, compression: Any) -> None:
        """Copies the parameter's (compressed) gradient into its slot."""
        small, self.contexts[parameter] = compression.compress(parameter.grad)
        if self.flat.numel() != self.elements or self.flat.dtype != small.dtype:
            self.flat = torch.zeros(self.elements, dtype=small.dtype)
        self.slot(parameter).copy_(small)

    def empty(self, compression: Any) -> None:
        """Copies the reduced gradients back and prepares for the next step."""
        for parameter in self.parameters:
            reduced = compression.decompress(self.slot(parameter), self.contexts.pop(parameter))
            parameter.grad.copy_(reduced)
        self.waiting = set(self.parameters)
        self.handle = 0


def make_buckets(
    parameters: Sequence[torch.nn.Parameter], most_bytes: int, groups: Sequence[Sequence[torch.nn.Parameter]] = ()
) -> list[Bucket]:
    """Groups parameters of one type, last parameter first, into buckets of at most ``most_bytes`` (or one parameter).

    Every one of ``groups`` is a bucket for each of its types, whatever its size; they come before the others.
    """
    buckets: list[Bucket] = []
    grouped = {parameter for group in groups for parameter in group}
    for group in groups:
        for dtype in dict.fromkeys(p.dtype for p in group):
            buckets.append(Bucket(len(buckets), [p for p in group if p.dtype == dtype], dtype))
    open_groups: dict[torch.dtype, list[torch.nn.Parameter]] = {}
    open_bytes: dict[torch.dtype, int] = {}

    def close(dtype: torch.dtype) -> None:
        buckets.append(Bucket(len(buckets), open_groups.pop(dtype), dtype))
        open_bytes.pop(dtype)

    for parameter in reversed([p for p in parameters if p not in grouped]):
        dtype = parameter.dtype
        size = parameter.numel() * parameter.element_size()
        if dtype in open_groups and open_bytes[dtype] + size > most_bytes:
            close(dtype)
        open_groups.setdefault(dtype, []).append(parameter)
        open_bytes[dtype] = open_bytes.get(dtype, 0) + size
    for dtype in list(open_groups):
        close(dtype)
    return buckets
