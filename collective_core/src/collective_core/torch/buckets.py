"""How gradients are grouped: fixed buckets, the same on all ranks, in the order in which gradients came in the first rank's first step.

So the first bucket is complete early and its sum overlaps with the rest of the pass, and parameters that are never used hold up nothing.
Buckets are launched strictly in order, whatever the order in which gradients arrive: that is what makes the order of operations the same
on all ranks without asking each other.

A bucket is one flat tensor in the memory that the ranks of a host share (arena.py), where it is reduced without a copy. The
gradients of parameters in host memory are views of it: ``p.grad`` is moved there when it is ready, unless it is there already
because the last step's gradient was zeroed and not set to None.
"""

from __future__ import annotations

import warnings
from typing import Any, Sequence
from zlib import crc32

import numpy as np
import torch

from collective_core import _native, arena
from collective_core.errors import CollectiveError
from collective_core.torch.compression import Compression
from collective_core.torch.ops import handles

#: Bytes of a gradient that does not stay in a processor's cache until it is summed.
LARGE = 1 << 20


def gradient_memory(elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros in the memory that the ranks of this host share; where its size is limited, ordinary ones: slower, not wrong. Or on a GPU."""
    if device.type != "cpu":
        return torch.zeros(elements, dtype=dtype, device=device)
    length = elements * torch.empty(0, dtype=dtype).element_size()
    try:
        return torch.from_numpy(arena.empty(length, np.uint8, large_pages=True)).zero_().view(dtype)
    except CollectiveError:
        return torch.zeros(elements, dtype=dtype)


class Bucket:
    """Gradients that are summed as one flat tensor: on their GPU if NCCL sums it there, otherwise in host memory."""

    def __init__(self, name: str, parameters: list[torch.nn.Parameter], dtype: torch.dtype, uses_nccl: bool = False) -> None:
        # Sums go element by element through memory: where parameters lie in another order, the bucket has another name.
        layouts = [p.stride() for p in parameters if not p.is_contiguous()]
        self.name = f"{name}.{crc32(repr(layouts).encode()):x}" if layouts else name
        self.parameters = parameters
        self.dtype = dtype
        devices = {p.device for p in parameters}
        on_gpu = uses_nccl and len(devices) == 1 and parameters[0].is_cuda
        self.device = parameters[0].device if on_gpu else torch.device("cpu")
        self.waiting = set(parameters)
        self.flat: torch.Tensor = torch.empty(0)
        self.slots: dict[torch.nn.Parameter, torch.Tensor] = {}  # each parameter's part of it, in the parameter's shape
        self.contexts: dict[torch.nn.Parameter, Any] = {}
        self.handle = 0
        self.places: dict[torch.nn.Parameter, tuple[int, int]] = {}
        begin = 0
        for parameter in parameters:
            self.places[parameter] = (begin, begin + parameter.numel())
            begin += parameter.numel()
        self.elements = begin

    def fill(self, parameter: torch.nn.Parameter, compression: Any) -> None:
        """Brings the parameter's (compressed) gradient into its slot."""
        gradient = parameter.grad.detach()  # of backward(create_graph=True) it has a graph, which a sum over ranks ends
        small, self.contexts[parameter] = compression.compress(gradient)
        alone = len(self.parameters) == 1  # then its compressed form may have any length and shape
        elements = small.numel() if alone else self.elements
        if self.flat.numel() != elements or self.flat.dtype != small.dtype:
            self.flat = gradient_memory(elements, small.dtype, self.device)
            self.slots = {p: _slot(self.flat[begin:end], p) for p, (begin, end) in self.places.items() if not alone}
        if alone:
            same_shape = small.shape == parameter.shape
            self.slots[parameter] = _slot(self.flat, parameter) if same_shape else self.flat.view(small.shape)
        slot = self.slots[parameter]
        if small.data_ptr() != slot.data_ptr():
            _move(slot, small)
        if compression is Compression.none and gradient.device == slot.device:
            parameter.grad = slot

    def empty(self, compression: Any) -> None:
        """Brings the reduced gradients back to where they are not views."""
        for parameter in self.parameters:
            reduced = compression.decompress(self.slots[parameter], self.contexts.pop(parameter))
            if reduced.data_ptr() != parameter.grad.data_ptr():
                parameter.grad.copy_(reduced)

    def reset(self) -> None:
        """Prepares for the next step."""
        if self.handle:
            # Nobody has waited for it: the engine may go on using that memory.
            handles.abandon(self.handle)
            self.flat, self.handle = torch.empty(0), 0
        self.contexts.clear()
        self.waiting = set(self.parameters)


def _move(slot: torch.Tensor, gradient: torch.Tensor) -> None:
    """Copies a gradient into its slot; a large one past the caches, which it would only sweep."""
    length = slot.numel() * slot.element_size()
    same_form = slot.dtype == gradient.dtype and slot.shape == gradient.shape and slot.stride() == gradient.stride()
    if length >= LARGE and same_form and _is_dense(slot) and slot.device.type == gradient.device.type == "cpu":
        _native.copy(slot.data_ptr(), gradient.data_ptr(), length)
    else:
        slot.copy_(gradient)


def _slot(part: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
    """The part of a bucket in the parameter's shape and order in memory, which fused optimizers expect of a gradient."""
    return part.as_strided(parameter.shape, parameter.stride()) if _is_dense(parameter) else part.view(parameter.shape)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements neither overlap nor leave gaps: exactly then empty_like keeps the strides."""
    return bool(torch.empty_like(tensor, device="meta").stride() == tensor.stride())


def groups_of(parameters: list[torch.nn.Parameter], groups: Any, num_groups: int) -> list[list[torch.nn.Parameter]]:
    """The parameters that are to be summed together: as the caller lists them, or so many groups of about equal length."""
    if groups is not None and num_groups:
        warnings.warn("groups and num_groups are two ways to say the same: num_groups is ignored", stacklevel=4)
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


def make_buckets(
    parameters: Sequence[torch.nn.Parameter],
    most_bytes: int,
    groups: Sequence[Sequence[torch.nn.Parameter]],
    prefix: str,
    uses_nccl: bool = False,
) -> list[Bucket]:
    """Groups parameters of one type, in the order in which their gradients come, into buckets of at most ``most_bytes`` (or one parameter).

    Every one of ``groups`` is a bucket for each of its types, whatever its size. The buckets are in the order in which they will be
    complete. ``prefix`` begins the names, which no other optimizer's buckets may have.
    """
    parts: list[list[torch.nn.Parameter]] = []
    for group in groups:
        parts += [[p for p in group if p.dtype == dtype] for dtype in dict.fromkeys(p.dtype for p in group)]
    grouped = {parameter for group in groups for parameter in group}
    open_parts: dict[torch.dtype, list[torch.nn.Parameter]] = {}
    open_bytes: dict[torch.dtype, int] = {}
    for parameter in parameters:
        if parameter in grouped:
            continue
        dtype, size = parameter.dtype, parameter.numel() * parameter.element_size()
        if dtype not in open_parts or open_bytes[dtype] + size > most_bytes:
            open_parts[dtype], open_bytes[dtype] = [], 0
            parts.append(open_parts[dtype])
        open_parts[dtype].append(parameter)
        open_bytes[dtype] += size
    place = {parameter: number for number, parameter in enumerate(parameters)}
    parts.sort(key=lambda part: max(place[parameter] for parameter in part))
    return [Bucket(f"{prefix}.{number}", part, part[0].dtype, uses_nccl) for number, part in enumerate(parts)]
