"""Adasum: a sum of two gradients that does not grow where they point the same way, applied pairwise over all ranks.

    a + b combined  =  (1 - a·b / (2 a·a)) a  +  (1 - a·b / (2 b·b)) b

Parallel vectors are averaged, orthogonal ones added. Ranks are combined as the leaves of a binary tree, 0 with 1, 2 with 3, then those; a
number of ranks that is not a power of two leaves the last one over for the next level.

Every rank does the work for its slice of the vector: an alltoall brings it that slice of all ranks' vectors, the three dot products of a
pair are summed over the ranks at every level, and an allgather makes the result whole. That moves two vectors' length per rank, and
log2(n) times a few numbers. Dot products are formed in float64, in rank order, so all ranks agree.

DistributedOptimizer with ``op=Adasum``: every rank makes its own step, and the steps are combined. Adasum wants what the optimizer would
add to the parameters, with its learning rate and its momentum, not the gradient: two steps that point the same way are averaged, two that
do not disturb each other are added.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Iterable, Iterator

import torch

from collective_core import _native, arrays
from collective_core.runtime import membership, operations
from collective_core.runtime.process_sets import ProcessSet, global_process_set, members_of
from collective_core.torch.compiling import not_compiled
from collective_core.torch.ops.allreduce import Adasum, allreduce_
from collective_core.torch.optimizer.names import is_alone, names_of, number_of_optimizer
from collective_core.torch.tensors import unsupported_tensor, without_data


def _unsupported_reason(tensor: torch.Tensor) -> str:
    """Why there is no Adasum of the tensor; empty if there is."""
    if unsupported_tensor(tensor) or tensor.dtype.is_floating_point:
        return unsupported_tensor(tensor)
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
    members = members_of(process_set)
    # What follows knows the vector's length alone, and that rounded up.
    factors = {"reduce": _native.SUM, "prescale": prescale, "postscale": postscale}
    operations.run(without_data(tensor, f"{name}.adasum", members.id, _unsupported_reason(tensor), **factors))
    length = source.numel()
    share = -(-length // members.size)
    flat = torch.zeros(share * members.size, dtype=torch.float64 if source.dtype == torch.float64 else torch.float32)
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


class _AdasumOptimizer(torch.optim.Optimizer):
    """Methods that are mixed into the class of the wrapped optimizer."""

    #: A GradScaler calls ``step`` whether or not this rank's gradients are finite: the others wait there.
    _step_supports_amp_scaling = True

    def _distribute(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
        compression: Any,
        backward_passes_per_step: int,
        process_set: ProcessSet | None,
    ) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        self._parameter_names = names_of(parameters, named_parameters)
        self._trained = {p for p in parameters if p.requires_grad}  # at any time: who is frozen now may have momentum
        self._compression = compression
        self.backward_passes_per_step = backward_passes_per_step
        self.process_set = process_set if process_set is not None else global_process_set
        self._alone = is_alone(process_set)
        self._generation = membership.generation()
        self._prefix = number_of_optimizer("adasum", process_set, self._revoke)

    def _revoke(self) -> None:
        """Nothing to do: the parameters are touched in ``step`` alone."""

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Horovod's; for whoever asks. The ranks meet in ``step``, after however many passes."""
        self.backward_passes_per_step = passes

    def synchronize(self) -> None:
        """Nothing to wait for: the ranks meet in ``step``."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
        yield

    def _is_finite(self) -> bool:
        """Whether this rank makes a step; unscales its gradients where a GradScaler leaves that to the optimizer."""
        found_inf = getattr(self, "found_inf", None)  # a GradScaler's, like the scale
        if found_inf is None or "_step_supports_amp_scaling" in self.__dict__:  # the wrapped one, which is fused, does it
            return True
        scale = getattr(self, "grad_scale", None)
        self.found_inf = self.grad_scale = None  # the wrapped one refuses them
        if found_inf.item():
            return False
        if scale is not None:
            for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
                p.grad.div_(scale)
        return True

    @not_compiled
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        listed = [p for group in self.param_groups for p in group["params"]]
        self._trained.update(p for p in listed if p.requires_grad)
        before = {number: p.detach().clone() for number, p in enumerate(listed) if p in self._trained}
        result = super(self.__class__, self).step(closure) if self._is_finite() else None
        if self._generation != membership.generation():  # an elastic job
            self._generation, self._alone = membership.generation(), is_alone(self.process_set)
        if not self._alone:
            with torch.no_grad():
                for number, start in before.items():
                    parameter = listed[number]
                    change, restore = self._compression.compress(parameter.detach() - start)
                    name = f"{self._prefix}.{self._parameter_names.get(parameter, f'added.{number}')}"
                    allreduce_(change, name=name, op=Adasum, process_set=self.process_set)
                    parameter.copy_(start + self._compression.decompress(change, restore))
        return result


# As in distributed_optimizer.py: PyTorch's hooks run in the wrapped optimizer's own step.
_AdasumOptimizer.step.hooked = True  # type: ignore[attr-defined]


def distribute(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
    compression: Any,
    backward_passes_per_step: int,
    process_set: ProcessSet | None,
) -> Any:
    """The optimizer with steps that are combined by Adasum. Gradients of several backward passes add up before ``step``."""
    cls: Any = type(optimizer.__class__.__name__, (optimizer.__class__,), dict(_AdasumOptimizer.__dict__))
    wrapped: Any = cls.__new__(cls)
    wrapped.__dict__.update(optimizer.__dict__)
    wrapped.__dict__.pop("step", None)  # a scheduler made earlier has bound the unwrapped step here
    wrapped._distribute(named_parameters, compression, backward_passes_per_step, process_set)
    return wrapped
