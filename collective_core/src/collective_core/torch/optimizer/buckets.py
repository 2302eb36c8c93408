"""Groups of gradients: fixed buckets, the same on all ranks, in the order in which gradients came in the first rank's first step.

So the first bucket is complete early and its sum overlaps with the rest of the pass, and parameters that are never used hold up nothing.
Buckets are launched strictly in order, whatever the order in which gradients arrive: that is what makes the order of operations the same
on all ranks without asking each other.

A bucket is one flat tensor: on its parameters' GPU, or in the memory that the ranks of a host share (arrays.empty), where it is reduced
without a copy. The
gradients of parameters are views of it: ``p.grad`` is moved there, unless it is there already because the last
step's gradient was zeroed and not set to None. A large one is moved when it is ready, from a cache; small ones together.
With ``gradient_as_bucket_view=False`` they stay the program's own tensors, and the sums are copied into them.

Behind the gradients there is a mark for each of them: 1 where this rank has one. What no rank has used has a sum of 0 there, at no other
cost, and such a parameter is left without a gradient, so that the optimizer does not move it.
"""

from __future__ import annotations

import warnings
from functools import reduce
from itertools import accumulate
from typing import Any, Callable, Sequence
from zlib import crc32

import numpy as np
import torch

from collective_core import _native, arrays
from collective_core.errors import CollectiveError
from collective_core.torch import gpu, handles
from collective_core.torch.compression import Compression
from collective_core.torch.ops import allreduce
from collective_core.torch.tensors import is_in_host_memory

#: Bytes of gradients that do not stay in a processor's cache until they are summed, and so many at most wait to be moved.
LARGE = 1 << 20


def gradient_memory(elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros in the memory that the ranks of this host share; where its size is limited, ordinary ones: slower, not wrong. Or on a GPU."""
    if device.type != "cpu":
        return torch.zeros(elements, dtype=dtype, device=device)
    length = elements * torch.empty(0, dtype=dtype).element_size()
    try:
        return torch.from_numpy(arrays.empty(length, np.uint8, large_pages=True)).zero_().view(dtype)
    except CollectiveError:
        return torch.zeros(elements, dtype=dtype)


class Bucket:
    """Gradients of one type and device that are summed as one flat tensor, which lies there."""

    def __init__(
        self,
        name: str,
        parameters: list[torch.nn.Parameter],
        dtype: torch.dtype,
        compression: Any = Compression.none,
        as_views: bool = True,
    ) -> None:
        # Sums go element by element through memory: where parameters lie in another order, the bucket has another name.
        layouts = [p.stride() for p in parameters if not p.is_contiguous()]
        self.name = f"{name}.{crc32(repr(layouts).encode()):x}" if layouts else name
        self.parameters = parameters
        self.dtype = dtype
        self.device = parameters[0].device
        self.compression = compression
        self.as_views = as_views
        self.are_views = False  # those that were filled last
        # Of parameters, their positions in the list: a tensor's hash is a call of Python. `reset` begins them.
        self.awaited: set[int]  # whose gradients have not come
        self.unfilled: list[int]  # whose gradients have come and are not in their slots yet
        self.unfilled_bytes: int
        self.filled: list[int]  # whose gradients are in their slots
        self.early: list[int]  # those that were there before the pass had ended
        self.missing: set[int]  # for which this rank has no gradient, and others may
        # A compressor of the user's own may choose a type that a mark does not survive.
        self.tells_used_parameters = compression in (Compression.none, Compression.fp16, Compression.bf16)
        self.flat: torch.Tensor = torch.empty(0)
        self.used_parameters: torch.Tensor = torch.empty(0)
        self.slots: list[torch.Tensor] = []  # each parameter's part of it, in the parameter's shape
        self.addresses: list[int] = []  # where the slots are
        self.contexts: dict[int, Any] = {}
        self.handle = 0
        ends = [*accumulate(p.numel() for p in parameters)]
        self.ranges = [*zip([0, *ends], ends)]
        self.lengths = [p.numel() * p.element_size() for p in parameters]
        self.has_large = max(self.lengths) >= LARGE
        self.gradients = ends[-1]
        self.elements = self.gradients + (len(parameters) if self.tells_used_parameters else 0)
        self.reset()

    def take(self, position: int) -> bool:
        """Notes that the gradient of the parameter there has come; says whether to :meth:`fill` now."""
        self.awaited.discard(position)
        self.unfilled.append(position)
        self.unfilled_bytes += self.lengths[position]
        # From a GPU at once, in the stream in which the gradient was made.
        return self.unfilled_bytes >= LARGE or gpu.holds(self.parameters[position])

    def is_complete(self) -> bool:
        return not self.awaited

    def take_rest(self) -> None:
        """When the pass has ended: as if all the others had come, too."""
        self.early = self.filled.copy()
        self.unfilled += sorted(self.awaited)
        self.awaited.clear()

    def fill(self, note_sparse: Callable[[torch.nn.Parameter], None]) -> None:
        """Brings the (compressed) gradients of those that have come, and are not there, into their slots; zeros where there is none.

        ``note_sparse``: told of those that are made dense.
        """
        if not self.unfilled:
            return
        self._fill(self.unfilled, note_sparse)
        # Only now: those whose compressor has raised an exception are still to be filled.
        self.filled += self.unfilled
        self.unfilled, self.unfilled_bytes = [], 0

    def _fill(self, positions: list[int], note_sparse: Callable[[torch.nn.Parameter], None]) -> None:
        parameters = [self.parameters[position] for position in positions]
        gradients = [p.grad for p in parameters]
        with torch.no_grad():  # of backward(create_graph=True) they have a graph, which a sum over ranks ends
            for number in [number for number, gradient in enumerate(gradients) if gradient is None or gradient.is_sparse]:
                gradients[number] = self._made_dense(positions[number], note_sparse)
            is_plain = self._is_plain()
            self.are_views = is_plain and self.as_views
            if is_plain:
                self._provide(self.dtype)
                slots = [self._view(position) for position in positions]
                _copy_all(slots, gradients, self.has_large)
                if self.are_views:
                    for position, parameter, slot in zip(positions, parameters, slots):
                        if position not in self.missing:
                            parameter.grad = slot
                return
            one_type = reduce(torch.promote_types, (p.dtype for p in self.parameters))  # of a model that was converted in part
            for position, gradient in zip(positions, gradients):
                small, self.contexts[position] = self.compression.compress(gradient.detach())
                dtype = one_type if self.compression is Compression.none else small.dtype
                _copy_all([self._slot_for(position, small.shape, dtype)], [small], self.has_large)

    def _made_dense(self, position: int, note_sparse: Callable[[torch.nn.Parameter], None]) -> torch.Tensor:
        parameter = self.parameters[position]
        if parameter.grad is None:
            self.missing.add(position)
            return torch.zeros_like(parameter)
        note_sparse(parameter)
        parameter.grad = parameter.grad.to_dense()
        return parameter.grad

    def _is_plain(self) -> bool:
        """Whether gradients are views of it: not where the model was converted to another type or moved since the bucket was made."""
        return self.compression is Compression.none and all(p.dtype == self.dtype and p.device == self.device for p in self.parameters)

    def _provide(self, dtype: torch.dtype) -> None:
        """Makes the flat tensor and the slots, if there are none of that type yet."""
        if self.flat.dtype == dtype and self.flat.numel() == self.elements and self.slots:
            return
        self.flat = gradient_memory(self.elements, dtype, self.device)
        self.used_parameters = self.flat[self.gradients :]
        self.slots = [_slot(self.flat[begin:end], p) for p, (begin, end) in zip(self.parameters, self.ranges)]
        self.addresses = [slot.data_ptr() for slot in self.slots]

    def _view(self, position: int) -> torch.Tensor:
        """The parameter's slot, which ``p.grad`` has been: what a user did to that tensor must not move the slot."""
        slot = self.slots[position]
        if slot.requires_grad or slot.data_ptr() != self.addresses[position]:
            # `p.grad.data = ...`, or `p.grad` calculated anew of what has a gradient itself.
            begin, end = self.ranges[position]
            slot = self.slots[position] = _slot(self.flat[begin:end], self.parameters[position])
        return slot

    def _slot_for(self, position: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """For a compressed gradient; alone in its bucket it may have any length and shape, another in every step."""
        if len(self.parameters) > 1 or shape == self.parameters[position].shape:
            if self.slots and self.slots[position].shape != shape:
                self.slots = []
            self._provide(dtype)
            return self._view(position)
        if self.flat.numel() != shape.numel() or self.flat.dtype != dtype:
            self.flat = gradient_memory(shape.numel(), dtype, self.device)
        self.slots, self.addresses = [self.flat.view(shape)], [self.flat.data_ptr()]
        return self.slots[0]

    def start_sum(self, how: dict[str, Any]) -> None:
        """``how``: the keyword arguments of an allreduce."""
        self.mark()
        self.handle = allreduce.allreduce_async_(self.flat, name=self.name, **how)

    def sum_here(self, how: dict[str, Any]) -> None:
        """In this thread."""
        self.mark()
        allreduce.allreduce_(self.flat, name=self.name, **how)

    def mark(self) -> None:
        """Before the sum: for which gradients this rank has one."""
        self.used_parameters.fill_(1.0)
        if self.missing and self.tells_used_parameters:
            self.used_parameters[list(self.missing)] = 0.0

    def is_used(self) -> list[bool]:
        """After the sum: of each parameter, whether any rank has a gradient."""
        return (self.used_parameters != 0).tolist() if self.tells_used_parameters else [True] * len(self.parameters)

    def _take_from_others(self) -> set[int]:
        """Gives parameters that only other ranks have used a gradient, to be filled; returns those that no rank has used."""
        is_used = self.is_used()
        unused = {position for position in self.missing if not is_used[position]}
        is_view = self.as_views and self._is_plain()
        for position in unused:
            self.contexts.pop(position, None)
        for position in self.missing - unused:
            parameter = self.parameters[position]
            parameter.grad = self._view(position) if is_view else torch.empty_like(parameter, requires_grad=False)
        return unused

    def empty(self) -> None:
        """Brings the reduced gradients back to where they are not views."""
        unused = self._take_from_others() if self.missing else ()
        # Those that became views since the pass has ended still are: nothing of the program's has run in between.
        for position in self.early if self.are_views and not self.contexts else range(len(self.parameters)):
            if position in unused:
                continue
            gradient, slot = self.parameters[position].grad, self.slots[position]
            if position in self.contexts:
                with torch.no_grad():
                    gradient.copy_(self.compression.decompress(slot, self.contexts.pop(position)))
            elif gradient is not slot or self._view(position) is not slot:
                with torch.no_grad():
                    gradient.copy_(self._view(position))

    def reset(self) -> None:
        """Prepares for the next step."""
        if self.handle:
            # Nobody has waited for it: the engine may go on using that memory.
            handles.abandon(self.handle)
            self.flat, self.used_parameters, self.handle = torch.empty(0), torch.empty(0), 0
        self.contexts.clear()
        self.awaited = set(range(len(self.parameters)))
        self.unfilled, self.unfilled_bytes, self.filled, self.early, self.missing = [], 0, [], [], set()


def _copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor], has_large: bool) -> None:
    """Copies tensor by tensor: large ones past the caches, which they would only sweep, the others in one call, where PyTorch has one."""
    if has_large:
        pairs = [pair for pair in zip(targets, sources) if not _copied_past_caches(*pair)]
        targets, sources = [target for target, _ in pairs], [source for _, source in pairs]
    if targets and hasattr(torch, "_foreach_copy_"):
        torch._foreach_copy_(targets, sources)
        return
    for target, source in zip(targets, sources):
        target.copy_(source)


def _copied_past_caches(target: torch.Tensor, source: torch.Tensor) -> bool:
    length = target.numel() * target.element_size()
    if length < LARGE or not is_in_host_memory(target) or not is_in_host_memory(source):
        return False
    same_form = target.dtype == source.dtype and target.shape == source.shape and target.stride() == source.stride()
    if not same_form or not _is_dense(target):
        return False
    if target.data_ptr() != source.data_ptr():
        _native.copy(target.data_ptr(), source.data_ptr(), length)
    return True


def _slot(part: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
    """The part of a bucket in the parameter's shape and order in memory, which fused optimizers expect of a gradient."""
    shaped = part.as_strided(parameter.shape, parameter.stride()) if _is_dense(parameter) else part.view(parameter.shape)
    return shaped.detach()  # a gradient of its own, not a view with a history


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements neither overlap nor leave gaps: exactly then empty_like keeps the strides."""
    return bool(torch.empty_like(tensor, device="meta").stride() == tensor.stride())


def groups_of(parameters: list[torch.nn.Parameter], groups: Any, num_groups: int) -> list[list[torch.nn.Parameter]]:
    """The parameters that are to be summed together: as the caller lists them, or so many groups of about equal length."""
    if groups is not None and num_groups:
        warnings.warn("groups and num_groups are two ways to say the same: num_groups is ignored", stacklevel=6)
    if groups is None or isinstance(groups, int):
        number = min(groups or num_groups, len(parameters))
        if number < 0:
            raise ValueError(f"the number of groups must not be negative, not {number}")
        ends = [len(parameters) * (i + 1) // number for i in range(number)]
        return [parameters[begin:end] for begin, end in zip([0, *ends], ends)][::-1]
    if any(not isinstance(group, (list, tuple)) or any(not torch.is_tensor(p) for p in group) for group in groups):
        raise ValueError("groups should be a number, or a list of lists of parameters")
    listed = [parameter for group in groups for parameter in group]
    if len(set(listed)) < len(listed):
        raise ValueError("a parameter can only appear once in groups")
    known = set(parameters)
    return [[p for p in group if p in known] for group in groups]


def _kind(parameter: torch.nn.Parameter) -> tuple[torch.dtype, torch.device]:
    return parameter.dtype, parameter.device


def make_buckets(
    parameters: Sequence[torch.nn.Parameter],
    most_bytes: int,
    groups: Sequence[Sequence[torch.nn.Parameter]],
    prefix: str,
    compression: Any = Compression.none,
    as_views: bool = True,
) -> list[Bucket]:
    """Groups parameters of one type and device, in the order in which their gradients come, into buckets of at most ``most_bytes`` (or one
    parameter).

    Every one of ``groups`` is a bucket for each type and device in it, whatever its size. The buckets are in the order in which they will
    be complete. ``prefix`` begins the names, which no other optimizer's buckets may have.
    """
    parts: list[list[torch.nn.Parameter]] = []
    for group in groups:
        parts += [[p for p in group if _kind(p) == kind] for kind in dict.fromkeys(map(_kind, group))]
    grouped = {parameter for group in groups for parameter in group}
    open_parts: dict[Any, list[torch.nn.Parameter]] = {}
    open_bytes: dict[Any, int] = {}
    for parameter in parameters:
        if parameter in grouped:
            continue
        kind, size = _kind(parameter), parameter.numel() * parameter.element_size()
        if kind not in open_parts or open_bytes[kind] + size > most_bytes:
            open_parts[kind], open_bytes[kind] = [], 0
            parts.append(open_parts[kind])
        open_parts[kind].append(parameter)
        open_bytes[kind] += size
    position = {parameter: number for number, parameter in enumerate(parameters)}
    parts.sort(key=lambda part: max(position[parameter] for parameter in part))
    return [Bucket(f"{prefix}.{number}", part, part[0].dtype, compression, as_views) for number, part in enumerate(parts)]
