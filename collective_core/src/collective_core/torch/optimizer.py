"""DistributedOptimizer: sums gradients over all ranks while the backward pass still runs, then steps.

A hook on every parameter notes when its gradient is ready. When all gradients of a bucket are, and all earlier buckets have
gone, the bucket is submitted to the engine (buckets.py says why in this order). ``step`` waits for all of them.
"""

from __future__ import annotations

import threading
import warnings
from contextlib import contextmanager
from typing import Any, Callable, Iterable, Iterator

import torch

from collective_core import context
from collective_core.errors import CollectiveError
from collective_core.torch.buckets import Bucket, make_buckets
from collective_core.torch.compression import Compression
from collective_core.torch.ops import allreduce, handles


class _DistributedOptimizer(torch.optim.Optimizer):
    """Methods that :func:`DistributedOptimizer` mixes into the class of the optimizer that it wraps."""

    def _distribute(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
        compression: Any,
        backward_passes_per_step: int,
        op: str,
        gradient_predivide_factor: float,
    ) -> None:
        self._compression = compression
        self._passes_per_step = backward_passes_per_step
        self._op = op
        # Average divides in the engine; the factor is taken out before the sum and put back after it.
        self._prescale = 1.0 / gradient_predivide_factor
        self._postscale = gradient_predivide_factor
        self._should_synchronize = True
        self._synchronized = False
        self._lock = threading.Lock()  # hooks may run in autograd's threads

        parameters = [p for group in self.param_groups for p in group["params"]]
        self._names = _names_of(parameters, named_parameters)
        self._trained = [p for p in parameters if p.requires_grad]
        self._hook_handles: list[Any] = []
        self._make_buckets()
        if context.size() > 1:
            for parameter in self._trained:
                self._hook_handles.append(_on_gradient(parameter, self._gradient_ready))

    def _make_buckets(self) -> None:
        self._buckets = make_buckets(self._trained, context.current().config.fusion_bytes)
        self._bucket_of: dict[torch.nn.Parameter, Bucket] = {p: b for b in self._buckets for p in b.parameters}
        self._passes_left = dict.fromkeys(self._trained, self._passes_per_step)
        self._launched = 0

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes after how many backward passes gradients are summed. Not between backward and step."""
        self._require_idle("set_backward_passes_per_step")
        self._passes_per_step = passes
        self._passes_left = dict.fromkeys(self._trained, passes)

    def _is_under_way(self) -> bool:
        """Whether gradients of an unfinished step have been taken over."""
        return any(len(bucket.waiting) < len(bucket.parameters) for bucket in self._buckets)

    def _require_idle(self, call: str) -> None:
        if self._is_under_way():
            raise AssertionError(f"{call} was called after loss.backward() but before optimizer.step() or optimizer.synchronize()")

    def _gradient_ready(self, parameter: torch.nn.Parameter) -> None:
        with self._lock:
            if self._passes_left[parameter] <= 0:
                raise AssertionError(
                    "Gradients were computed more than backward_passes_per_step times before call to step(). "
                    "Increase backward_passes_per_step to accumulate gradients locally."
                )
            self._passes_left[parameter] -= 1
            if self._passes_left[parameter] == 0:
                self._add(parameter)
                self._launch_complete()

    def _add(self, parameter: torch.nn.Parameter) -> None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)  # unused on this rank: it counts as zero
        if parameter.grad.is_sparse:
            raise CollectiveError(f"{self._names[parameter]}: sparse gradients are not in this version", "invalid")
        bucket = self._bucket_of[parameter]
        bucket.fill(parameter, self._compression)
        bucket.waiting.discard(parameter)

    def _launch_complete(self) -> None:
        while self._launched < len(self._buckets) and not self._buckets[self._launched].waiting:
            bucket = self._buckets[self._launched]
            bucket.handle = allreduce.allreduce_async_(
                bucket.flat,
                name=bucket.name,
                op=self._op,
                prescale_factor=self._prescale,
                postscale_factor=self._postscale,
            )
            self._launched += 1

    def synchronize(self) -> None:
        """Waits until all gradients are reduced and writes them into ``p.grad``. Parameters without one count as zero."""
        if context.size() > 1:
            with self._lock:
                for bucket in self._buckets:
                    for parameter in [p for p in bucket.parameters if p in bucket.waiting]:
                        self._add(parameter)
                self._launch_complete()
            try:
                with torch.no_grad():
                    for bucket in self._buckets:
                        handles.synchronize(bucket.handle)
                        bucket.empty(self._compression)
            finally:
                self._launched = 0
                for bucket in self._buckets:
                    bucket.waiting = set(bucket.parameters)
        self._passes_left = dict.fromkeys(self._trained, self._passes_per_step)
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """``step`` inside this context does not synchronize: for scripts that call ``synchronize`` themselves."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
                    "This can cause training slowdown. You may want to consider using optimizer.skip_synchronize() context if "
                    "you use optimizer.synchronize() in your code.",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        return super(self.__class__, self).step(closure)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        if self._is_under_way():
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or optimizer.synchronize(). "
                "This is prohibited as it can cause a race condition."
            )
        super(self.__class__, self).zero_grad(*args, **kwargs)


def _names_of(
    parameters: list[torch.nn.Parameter], named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None
) -> dict[torch.nn.Parameter, str]:
    """Every parameter's name. Raises ValueError, as Horovod does, for duplicate or missing names."""
    if named_parameters is None:
        return {p: f"gradient.{i}" for i, p in enumerate(parameters)}
    named = list(named_parameters)
    if any(not isinstance(pair, tuple) for pair in named):
        raise ValueError("named_parameters should be a sequence of tuples (name, parameter), usually produced by model.named_parameters().")
    seen: dict[str, int] = {}
    for name, _ in named:
        seen[name] = seen.get(name, 0) + 1
    duplicates = sorted(name for name, times in seen.items() if times > 1)
    if duplicates:
        raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(duplicates)}")
    names = {p: name for name, p in named}
    if any(p not in names for p in parameters):
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named. "
            "Python object ids: " + ", ".join(str(id(p)) for p in parameters if p not in names)
        )
    return names


def _on_gradient(parameter: torch.nn.Parameter, ready: Callable[[torch.nn.Parameter], None]) -> Any:
    """Calls ``ready`` each time after a gradient was accumulated into the parameter. Returns what keeps the hook alive."""
    if hasattr(parameter, "register_post_accumulate_grad_hook"):
        return parameter.register_post_accumulate_grad_hook(ready)
    # Before PyTorch 2.1: the parameter's accumulation node, which is found behind any view of it.
    node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
    node.register_hook(lambda *_: ready(parameter))
    return node


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: str = allreduce.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any | None = None,
    sparse_as_dense: bool = False,
    process_set: Any | None = None,
) -> Any:
    """The optimizer, with gradients that are averaged (``op``) over all ranks before every step.

    The result is an instance of the optimizer's own class with its state and options. ``backward_passes_per_step``:
    gradients of so many passes are added up locally before they are summed over the ranks. ``gradient_predivide_factor``
    splits the division of an average: by the factor before the sum, by size / factor after it. ``num_groups`` and ``groups``
    are accepted and have no effect: buckets are of COLLECTIVE_FUSION_MB.
    """
    if op not in (allreduce.Average, allreduce.Sum):
        raise CollectiveError(f"DistributedOptimizer with op={op!r} is not in this version; use Average or Sum", "invalid")
    if gradient_predivide_factor != 1.0 and op != allreduce.Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if process_set is not None or sparse_as_dense:
        raise CollectiveError("process_set and sparse_as_dense are not in this version", "invalid")
    del num_groups, groups
    cls: Any = type(optimizer.__class__.__name__, (optimizer.__class__,), dict(_DistributedOptimizer.__dict__))
    wrapped: Any = cls.__new__(cls)
    wrapped.__dict__.update(optimizer.__dict__)
    wrapped.__dict__.pop("step", None)  # a scheduler made earlier has bound the unwrapped step here
    wrapped._distribute(named_parameters, compression, backward_passes_per_step, op, gradient_predivide_factor)
    return wrapped
