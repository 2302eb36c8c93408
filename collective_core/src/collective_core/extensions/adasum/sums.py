"""Adasum: a sum of two gradients that does not grow where they point the same way, applied pairwise over all ranks.

    a + b combined  =  (1 - a·b / (2 a·a)) a  +  (1 - a·b / (2 b·b)) b

Parallel vectors are averaged, orthogonal ones added. Ranks are combined as the leaves of a binary tree, 0 with 1, 2 with 3,
then those; a number of ranks that is not a power of two leaves the last one over for the next level.

Every rank does the work for its slice of the vector: an alltoall brings it that slice of all ranks' vectors, the three dot
products of a pair are summed over the ranks at every level, and an allgather makes the result whole. That moves two vectors'
length per rank, and log2(n) times a few numbers. Dot products are formed in float64, in rank order, so all ranks agree.
"""

from __future__ import annotations

from typing import Callable

import torch

from collective_core import _native, arrays
from collective_core.runtime import operations
from collective_core.runtime.process_sets import ProcessSet, members
from collective_core.torch.ops.tensors import objection_to_tensor, without_data


def _objection(tensor: torch.Tensor) -> str:
    """Why there is no Adasum of the tensor; empty if there is."""
    if objection_to_tensor(tensor) or tensor.dtype.is_floating_point:
        return objection_to_tensor(tensor)
    return f"Adasum needs a floating-point tensor, not {tensor.dtype}"


def combine(
    tensor: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    name: str,
    prescale: float,
    postscale: float,
    process_set: ProcessSet | None,
) -> None:
    """Writes the Adasum of all ranks' ``tensor`` into ``target``. Blocks.

    ``source`` has the tensor's values; both it and ``target`` are contiguous in host memory.
    """
    who = members(process_set)
    # What follows knows the vector's length alone, and that rounded up.
    operations.run(without_data(tensor, f"{name}.adasum", who, _native.SUM, prescale, postscale, _objection(tensor)))
    length = source.numel()
    share = -(-length // who.size)
    flat = torch.zeros(share * who.size, dtype=torch.float64 if source.dtype == torch.float64 else torch.float32)
    flat[:length] = source.reshape(-1).to(flat.dtype) * prescale  # the zeros after it change no dot product
    if length == 0:
        return
    slices, rows = arrays.alltoall_without_joined(flat.numpy(), f"{name}.adasum.slices", process_set)
    if 0 in rows:
        # A rank has joined: it would drop its slice. The others do all the work on whole vectors.
        everyone = torch.from_numpy(arrays.allgather_without_joined(flat.numpy(), f"{name}.adasum.vectors", process_set))
        whole = _tree(list(everyone.split(len(flat))), lambda dots, _: dots)
    else:

        def over_ranks(dots: torch.Tensor, level: int) -> torch.Tensor:
            name_of_level = f"{name}.adasum.{level}"
            return torch.from_numpy(arrays.allreduce(dots.numpy(), name_of_level, arrays.Sum, process_set=process_set))

        mine = _tree(list(torch.from_numpy(slices).split(share)), over_ranks)
        whole = torch.from_numpy(arrays.allgather_without_joined(mine.contiguous().numpy(), f"{name}.adasum.whole", process_set))
    with torch.no_grad():
        target.copy_((whole[:length] * postscale).view(target.shape))


def _tree(vectors: list[torch.Tensor], complete: Callable[[torch.Tensor, int], torch.Tensor]) -> torch.Tensor:
    """Combines the vectors. ``complete`` turns the dot products of parts of vectors into those of whole ones."""
    level = 0
    while len(vectors) > 1:
        pairs = list(zip(vectors[0::2], vectors[1::2]))
        dots = complete(torch.stack([_dots(a.double(), b.double()) for a, b in pairs]), level)
        combined = [_combine(a, b, products) for (a, b), products in zip(pairs, dots)]
        vectors = combined + vectors[2 * len(pairs) :]
        level += 1
    return vectors[0]


def _dots(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.stack([a @ b, a @ a, b @ b])


def _combine(a: torch.Tensor, b: torch.Tensor, products: torch.Tensor) -> torch.Tensor:
    both, of_a, of_b = products.tolist()
    share_of_a = 1.0 - both / (2.0 * of_a) if of_a > 0 else 1.0
    share_of_b = 1.0 - both / (2.0 * of_b) if of_b > 0 else 1.0
    return a * share_of_a + b * share_of_b
