"""DistributedOptimizer with Adasum: every rank makes its own step, and the steps are combined.

Adasum wants what the optimizer would add to the parameters, with its learning rate and its momentum, not the gradient: two
steps that point the same way are averaged, two that do not disturb each other are added.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Iterable, Iterator

import torch

from collective_core.runtime import membership
from collective_core.runtime.process_sets import ProcessSet, global_process_set
from collective_core.torch.compiling import not_compiled
from collective_core.torch.ops.allreduce import Adasum, allreduce_
from collective_core.torch.optimizer.names import is_alone, names_of, number_of_optimizer


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
        self._prefix = number_of_optimizer("adasum", process_set, self._let_go)

    def _let_go(self) -> None:
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
