"""DistributedOptimizer: the optimizer's own class, whose steps are made with gradients that were reduced over all ranks (reducer.py)."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, Callable, Iterable, Iterator

import torch

from collective_core.errors import InvalidUseError
from collective_core.lazy import extension
from collective_core.runtime.process_sets import ProcessSet, global_process_set, members_of
from collective_core.torch.compiling import not_compiled
from collective_core.torch.compression import STATE_KEY, Compression, LossyCompression
from collective_core.torch.ops import allreduce
from collective_core.torch.optimizer.gradient_scaling import call_of_scaler
from collective_core.torch.optimizer.reducer import Reducer
from collective_core.torch.sharded import is_shard, require_shard, shards_in, step_all


class _DistributedOptimizer(torch.optim.Optimizer):
    """Methods that :func:`DistributedOptimizer` mixes into the class of the optimizer that it wraps.

    Programs written for Horovod do that themselves, with its constructor: ``type(name, (kind,), dict(_DistributedOptimizer.__dict__))``,
    or with the dictionary of a class that inherits from this one. A class of both, ``class Mine(_DistributedOptimizer, SGD)``, works, too.
    """

    def __init__(
        self,
        params: Any,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
        compression: Any = Compression.none,
        backward_passes_per_step: int = 1,
        op: str = allreduce.Average,
        gradient_predivide_factor: float = 1.0,
        groups: Any = None,
        sparse_as_dense: bool = False,
        process_set: ProcessSet | None = None,
    ) -> None:
        if op == allreduce.Adasum:
            raise ValueError("an optimizer with op=Adasum is made by DistributedOptimizer(optimizer, op=Adasum)")
        _check_options(op, gradient_predivide_factor, backward_passes_per_step)
        _wrapped(self).__init__(params)
        self._distribute(
            named_parameters, compression, backward_passes_per_step, op, gradient_predivide_factor, groups, 0, sparse_as_dense, process_set
        )

    def _distribute(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
        compression: Any,
        backward_passes_per_step: int,
        op: str,
        gradient_predivide_factor: float,
        groups: Any,
        num_groups: int,
        sparse_as_dense: bool,
        process_set: ProcessSet | None,
        gradient_as_bucket_view: bool = True,
    ) -> None:
        self._compression = compression
        self._predivide_factor = gradient_predivide_factor
        self._should_synchronize = True
        self._look: FrameType | None = None  # a GradScaler's, at what is in p.grad
        how = {
            "op": op,
            # Average divides in the engine; the factor is taken out before the sum and put back after it.
            "prescale_factor": 1.0 / gradient_predivide_factor,
            "postscale_factor": gradient_predivide_factor,
            "process_set": process_set if process_set is not None else global_process_set,
        }
        _check_tables(self, process_set if process_set is not None else global_process_set)
        wants_sparse = isinstance(self, torch.optim.SparseAdam)
        rest = groups, num_groups, sparse_as_dense, wants_sparse, gradient_as_bucket_view
        self._reducer = Reducer(self._listed(), named_parameters, compression, backward_passes_per_step, how, *rest)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's own. A GradScaler asks for them when it is about to look at gradients: these are reduced before."""
        groups: list[dict[str, Any]] | None = self.__dict__.get("param_groups")
        if groups is None:  # its class has another's, or Python asks __getattr__ of an object that hands everything on
            groups = _wrapped(self).param_groups
        look = call_of_scaler("unscale_")
        if look is not None and look is not self._look:
            self._reduce_for_scaler(look)
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = groups

    def _listed(self) -> list[torch.nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"] if not is_shard(p)]

    # What programs look up of Horovod's. What cannot change once buckets are made cannot be set, either.

    @property
    def op(self) -> str:
        return str(self._reducer.how["op"])

    @property
    def process_set(self) -> ProcessSet:
        return self._reducer.process_set

    @property
    def gradient_predivide_factor(self) -> float:
        return self._predivide_factor

    @property
    def sparse_as_dense(self) -> bool:
        return self._reducer.sparse_as_dense

    @property
    def _parameter_names(self) -> dict[torch.nn.Parameter, str]:
        return self._reducer.names

    @property
    def backward_passes_per_step(self) -> int:
        """After how many backward passes gradients are summed."""
        return self._reducer.passes

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, passes: int) -> None:
        self.set_backward_passes_per_step(passes)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes after how many backward passes gradients are summed. Not between backward and step."""
        if self._reducer.is_under_way():
            raise AssertionError(
                "set_backward_passes_per_step was called after loss.backward() but before optimizer.step() or optimizer.synchronize()"
            )
        self._reducer.passes = passes
        self._reducer.begin_anew()

    @not_compiled
    def synchronize(self) -> None:
        """Waits until all gradients are reduced and writes them into ``p.grad``.

        A rank without one counts as zero; where no rank has one it stays None, and the optimizer leaves the parameter alone.
        """
        self._reducer.synchronize(self._listed())
        self._look = None

    def _reduce_for_scaler(self, look: FrameType) -> None:
        """Before a GradScaler unscales gradients, and looks for infinities among them. The program may have reduced them itself."""
        # A scaler looks once in a step: if it does again, that step was left out. Hooks of a compiled backward pass note nothing.
        last, self._look = self._look, look
        if last is not None:
            self._reducer.is_done = False
        self._refuse_scaler_before_reduction(not self._should_synchronize)
        self._refuse_with_tables(True, "a GradScaler")
        if self._should_synchronize and self._are_gradients_own():
            self.synchronize()
            self._look = look

    def _are_gradients_own(self) -> bool:
        """Whether some have come since they were last reduced: the program may have reduced those of a step and then left it out."""
        return self._reducer.is_under_way() or not self._reducer.is_done

    def _refuse_scaler_before_reduction(self, looks: bool) -> None:
        """A scaler that ``looks`` at a rank's own gradients would have the ranks scale and skip steps each for itself."""
        if looks and not self._reducer.is_alone and self._are_gradients_own():
            text = "a GradScaler has come before the gradients were reduced, so that ranks would skip different steps: call "
            text += "optimizer.synchronize() before scaler.unscale_() and scaler.step(), or leave skip_synchronize() away"
            raise InvalidUseError(text, "invalid")

    def _refuse_with_tables(self, is_used: bool, what: str) -> None:
        if is_used and shards_in(self.param_groups):
            raise InvalidUseError(
                f"{what} is not possible with the rows of sharded tables, whose gradients are with other ranks", "invalid"
            )

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's own, which it also loads without this; with a lossy compression, what this rank has not sent yet, too."""
        state: dict[str, Any] = _wrapped(self).state_dict()
        if self._reducer.error_feedback is not None:
            state[STATE_KEY] = self._reducer.error_feedback.state(self._listed())
        return state

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """The wrapped optimizer's own; what was under way of a step is dropped."""
        self._reducer.begin_anew()
        self._reducer.is_done, self._look = False, None
        _wrapped(self).load_state_dict({key: value for key, value in state_dict.items() if key != STATE_KEY}, *args, **kwargs)
        if self._reducer.error_feedback is not None and STATE_KEY in state_dict:
            self._reducer.error_feedback.load(state_dict[STATE_KEY], self._listed())

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """``step`` inside this context does not synchronize: for scripts that call ``synchronize`` themselves."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    @not_compiled
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The wrapped optimizer's own, on reduced gradients: those of ``backward``, or those that ``closure`` computes at every call.

        What the closure returns is reduced like the gradients, so that all ranks decide alike what depends on the loss (LBFGS).
        Rows of sharded tables (``hvd.nn``) are updated after the other parameters.
        """
        self._refuse_with_tables(closure is not None, "a closure")
        self._refuse_scaler_before_reduction(getattr(self, "found_inf", None) is not None)  # of a fused optimizer, by any scaler
        if self._should_synchronize and (self._are_gradients_own() or call_of_scaler("step") is None):
            if self._reducer.is_done and self._look is None:  # what a scaler has looked at may be of a step that was left out
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
                    "This can cause training slowdown. You may want to consider using optimizer.skip_synchronize() context if "
                    "you use optimizer.synchronize() in your code.",
                    stacklevel=2,
                )
            if closure is None or self._reducer.is_under_way():
                self.synchronize()
            if closure is not None:
                closure = partial(self._evaluate, closure)
        try:
            result = _wrapped(self).step(closure)
            self._step_tables()
            return result
        finally:
            self._reducer.is_done, self._look = False, None

    def _step_tables(self) -> None:
        tables = shards_in(self.param_groups)
        if tables:
            step_all(tables, members_of(self.process_set).size if self.op == allreduce.Average else 1)

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """Calls the closure of a step and reduces what it leaves."""
        loss = closure()
        # One that only returns a loss leaves nothing: its gradients came before the step.
        if self._are_gradients_own():
            self.synchronize()
            self._reducer.is_done = False  # of another call's gradients
        is_number = isinstance(loss, (int, float)) or (torch.is_tensor(loss) and loss.numel() == 1)
        if self._reducer.is_alone or not is_number:
            return loss
        number = loss.detach().clone() if torch.is_tensor(loss) else torch.tensor(float(loss), dtype=torch.float64)
        return self._reducer.reduced(number, "loss")

    @not_compiled
    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        if self._reducer.is_under_way():
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or optimizer.synchronize(). "
                "This is prohibited as it can cause a race condition."
            )
        self._reducer.is_done, self._look = False, None
        for table, _ in shards_in(self.param_groups):
            table.drop_gradients()
        _wrapped(self).zero_grad(*args, **kwargs)


def _wrapped(optimizer: Any) -> Any:
    """The wrapped optimizer's own methods: of the class behind that which these here are in, by inheritance or because they were copied."""
    last = [kind for kind in type(optimizer).__mro__ if "_distribute" in kind.__dict__][-1]
    return super(last, optimizer)


def _check_options(op: str, gradient_predivide_factor: float, backward_passes_per_step: int) -> None:
    if op not in (allreduce.Average, allreduce.Sum, allreduce.Adasum):
        raise ValueError(f"DistributedOptimizer takes op Average, Sum or Adasum, not {op!r}")
    if gradient_predivide_factor != 1.0 and op != allreduce.Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if backward_passes_per_step < 1:
        raise ValueError("backward_passes_per_step must be at least 1")


def _check_tables(optimizer: torch.optim.Optimizer, process_set: ProcessSet) -> None:
    for table, _ in shards_in(optimizer.param_groups):
        require_shard(table, "a parameter")
        theirs = table.process_set if table.process_set is not None else global_process_set
        if theirs.process_set_id != process_set.process_set_id:
            raise ValueError(
                f"{table.name} is divided over {theirs}, and the optimizer averages over {process_set}: give both the same one"
            )


# PyTorch wraps `step` of a class to run its hooks, once; the wrapped optimizer's own step, which this one calls, is wrapped already.
_DistributedOptimizer.step.hooked = True  # type: ignore[attr-defined]


@not_compiled
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
    process_set: ProcessSet | None = None,
    gradient_as_bucket_view: bool = True,
) -> Any:
    """The optimizer, with gradients that are averaged (``op``) over all ranks before every step.

    The result is an instance of the optimizer's own class with its state and options. ``backward_passes_per_step``:
    gradients of so many passes are added up locally before they are summed over the ranks. ``gradient_predivide_factor``
    splits the division of an average: by the factor before the sum, by size / factor after it. ``groups``: lists of
    parameters, or a number of groups (``num_groups`` is its old name), that are summed together; other parameters are, in
    buckets of COLLECTIVE_FUSION_MB. ``sparse_as_dense``: sparse gradients are made dense to be summed, otherwise rows
    are gathered; the optimizer finds sparse ones. With ``op=Adasum``, what the optimizer adds to the parameters is combined, not
    the gradients. ``gradient_as_bucket_view``: ``p.grad`` is a view of memory that the next step writes to, so clone what is to be kept;
    with False, as in DDP, gradients are tensors of their own, which costs a copy more. ``compression``: of gradients on their way; int8,
    topk and powersgd leave something out, which is added to the next step's gradients and is part of the state (docs/slow-networks.md).
    """
    _check_options(op, gradient_predivide_factor, backward_passes_per_step)
    if isinstance(compression, type) and issubclass(compression, LossyCompression):
        raise ValueError(f"compression={compression.__name__} is a class: write it with its options, as compression={compression()}")
    if op == allreduce.Adasum and isinstance(compression, LossyCompression):
        raise ValueError(f"{compression} goes with op Average or Sum, not with Adasum, which combines steps and not gradients")
    if op == allreduce.Adasum:
        if shards_in(optimizer.param_groups):
            raise ValueError("op=Adasum is not possible with the rows of sharded tables, whose gradients are added; use Average or Sum")
        return extension("adasum").distribute(optimizer, named_parameters, compression, backward_passes_per_step, process_set)
    cls: Any = type(optimizer.__class__.__name__, (optimizer.__class__,), dict(_DistributedOptimizer.__dict__))
    wrapped: Any = cls.__new__(cls)
    wrapped.__dict__.update(optimizer.__dict__)
    wrapped.__dict__.pop("step", None)  # a scheduler made earlier has bound the unwrapped step here
    rest = groups, num_groups, sparse_as_dense, process_set, gradient_as_bucket_view
    wrapped._distribute(named_parameters, compression, backward_passes_per_step, op, gradient_predivide_factor, *rest)
    return wrapped
