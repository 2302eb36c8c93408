"""The small tensors of a group as one: a message each would cost more than what is in it.

Every group begins with one operation of its own, the head, in which its small tensors of one type and device travel one behind the
other. A checksum says which they are, so that it succeeds only where all ranks have the same ones. Where they do not, every rank sends
its tensors one by one after all: the tensor that differs is found and named, as if nothing had been fused.
"""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import Any, Callable, Sequence
from zlib import crc32

import torch

from collective_core.errors import CollectiveError
from collective_core.torch.handles import results_of
from collective_core.torch.tensors import unsupported_tensor

#: Bytes up to which a tensor is fused: what is larger takes longer to copy together than a message of its own takes.
MAX_BYTES = 64 << 10


def choose(tensors: Sequence[torch.Tensor], most_bytes: int) -> list[int]:
    """A group's tensors that are fused: the small ones of the commonest type and device, ``most_bytes`` in all; none rather than one."""
    kinds: dict[Any, list[int]] = {}
    for number, tensor in enumerate(tensors):
        if tensor.numel() * tensor.element_size() <= MAX_BYTES and not unsupported_tensor(tensor):
            kinds.setdefault((tensor.dtype, tensor.device), []).append(number)
    chosen, left = [], most_bytes
    for number in max(kinds.values(), key=len, default=[]):
        left -= tensors[number].numel() * tensors[number].element_size()
        if left >= 0:
            chosen.append(number)
    return chosen if len(chosen) > 1 else []


def checksum_of(tensors: Sequence[torch.Tensor], chosen: Sequence[int]) -> int:
    """Of which tensors are fused and of their shapes; not 0."""
    return crc32(repr([(number, tuple(tensors[number].shape)) for number in chosen]).encode()) or 1


class FusedGroup:
    """An allreduce of several tensors with one handle; the result is the list of their results. The tensors must not overlap.

    ``start_head``: starts the head, from a flat tensor into itself, with a checksum to be compared. ``start``: starts a tensor by number.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        most_bytes: int,
        start_head: Callable[[torch.Tensor, int], Any],
        start: Callable[[int], Any],
    ) -> None:
        self._outputs, self._start = outputs, start
        self._fused = choose(tensors, most_bytes)
        parts = [tensors[number].detach().reshape(-1) for number in self._fused]
        self._flat = torch.cat(parts) if parts else torch.empty(0)
        self._head = start_head(self._flat, checksum_of(tensors, self._fused))
        apart = set(self._fused)
        self._works = {number: start(number) for number in range(len(tensors)) if number not in apart}

    def is_done(self) -> bool:
        return self._head.is_done() and all(work.is_done() for work in self._works.values())

    def result(self) -> list[Any]:
        """Waits for all, and raises the first error only when no operation uses the tensors any more."""
        try:
            self._head.result()
        except CollectiveError as error:
            self._go_one_by_one(error)
        else:
            self._finish()
            self._take_apart()
        return list(self._outputs)

    def _finish(self) -> None:
        results_of([self._works[number].result for number in sorted(self._works)])

    def _take_apart(self) -> None:
        outputs = [self._outputs[number] for number in self._fused]
        with torch.no_grad():
            for output, part in zip(outputs, self._flat.split([output.numel() for output in outputs])):
                output.copy_(part.view(output.shape))

    def _go_one_by_one(self, error: CollectiveError) -> None:
        if not error.has_one_name:  # fatal, or others did something else altogether: they have no tensors of this group
            with suppress(CollectiveError):
                self._finish()
            raise error
        self._works.update((number, self._start(number)) for number in self._fused)
        self._finish()
        warnings.warn(
            f"a group of tensors went one by one, because the ranks fuse different ones (or have another COLLECTIVE_FUSION_MB): {error}",
            stacklevel=4,
        )
