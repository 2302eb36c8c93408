"""DistributedOptimizer: sums gradients over all ranks while the backward pass still runs, then steps.

A hook on every parameter notes when its gradient is ready. The first step notes the order in which they come, and at its end the ranks
agree on one plan: that of the first rank (:meth:`_agree`). From then on a bucket is submitted to the engine when all its gradients are
ready and all earlier buckets have gone (buckets.py says why in this order). The last one is complete when the pass ends and has nothing
to overlap with: ``step`` sums it in its own thread, without waking another, and waits for the others. Where the ranks of a single host
compute on all its cores, there is nothing to overlap with either (:func:`_can_overlap`): ``step`` sums all of them.
"""

from __future__ import annotations

import os
import threading
import warnings
from contextlib import contextmanager
from functools import partial
from operator import is_
from typing import Any, Callable, Iterable, Iterator
from zlib import crc32

import torch

from collective_core import context
from collective_core.elastic import worker
from collective_core.process_sets import ProcessSet, global_process_set
from collective_core.torch import gpu
from collective_core.torch.adasum_optimizer import distribute_with_adasum
from collective_core.torch.buckets import Bucket, groups_of, make_buckets
from collective_core.torch.compression import Compression
from collective_core.torch.hooks import on_gradient
from collective_core.torch.names import is_alone, names_of, number_of_optimizer
from collective_core.torch.ops import allreduce, handles
from collective_core.torch.ops.allgather import allgather
from collective_core.torch.ops.sparse import sparse_allreduce_async
from collective_core.torch.tuning import BucketTuner


class _DistributedOptimizer(torch.optim.Optimizer):
    """Methods that :func:`DistributedOptimizer` mixes into the class of the optimizer that it wraps."""

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
    ) -> None:
        self._compression = compression
        self.backward_passes_per_step = backward_passes_per_step
        self.op = op
        self.gradient_predivide_factor = gradient_predivide_factor
        self.sparse_as_dense = sparse_as_dense
        self.process_set = process_set if process_set is not None else global_process_set
        # Average divides in the engine; the factor is taken out before the sum and put back after it.
        self._prescale = 1.0 / gradient_predivide_factor
        self._postscale = gradient_predivide_factor
        self._should_synchronize = True
        self._synchronized = False
        self._lock = threading.Lock()  # hooks may run in autograd's threads

        self._alone = is_alone(process_set)
        self._prefix = number_of_optimizer("gradients", process_set, self._let_go)
        parameters = [p for group in self.param_groups for p in group["params"]]
        self._parameter_names = names_of(parameters, named_parameters)
        self._trained = [p for p in parameters if p.requires_grad]
        self._number_of = {parameter: number for number, parameter in enumerate(self._trained)}
        self._groups = groups_of(self._trained, groups, num_groups)
        self._generation, self._changes_seen = context.generation(), context.changes()
        self._end_hooks: list[Callable[[], None]] = []
        self._hooked: list[torch.nn.Parameter] = []
        self._number_of_hook: list[int] = []  # a parameter's number changes when others are taken on, its hook stays
        self._joins = context.joins(self._set_number())
        # Ranks that come to an elastic job later would begin to tune when the others have chosen.
        wants_tuning = context.current().config.autotune and not self._alone and bool(self._trained) and not worker.is_one()
        self._tuner = BucketTuner(self._trained, compression, self._prefix, process_set) if wants_tuning else None
        self._arrived: list[int] = []  # while there is no plan
        self._late: set[int] = set()  # parameters whose gradients turned out to be sparse after the ranks had agreed
        self._forget_plan()
        self._begin_anew()
        if not self._alone or worker.is_one():
            self._listen(self._trained)

    def _listen(self, parameters: list[torch.nn.Parameter]) -> None:
        self._end_hooks += [on_gradient(p, partial(self._gradient_ready, len(self._hooked) + i)) for i, p in enumerate(parameters)]
        self._hooked += parameters
        self._number_of_hook = [self._number_of.get(p, -1) for p in self._hooked]  # -1: the user has taken it out

    def _let_go(self) -> None:
        """Another optimizer is to have the parameters: no gradient is taken any more before ``step``."""
        for end in self._end_hooks:
            end()
        self._begin_anew()

    def _set_number(self) -> int:
        return self.process_set.process_set_id or 0

    def _notice_others(self) -> None:
        """Before anything of a step: in an elastic job the ranks may have changed, and after a join their tuning may differ."""
        self._changes_seen = context.changes()
        if self._generation != context.generation():
            # Perhaps from one or to one; and whatever was under way is not.
            self._generation = context.generation()
            self._begin_anew()
            self._synchronized = False
            self._alone = is_alone(self.process_set)
            self._forget_plan()
        elif self._joins != context.joins(self._set_number()):
            self._joins = context.joins(self._set_number())
            self._agreed = False  # a rank that had joined before its first step knows no plan
            if self._tuner and self._tuner.give_up():
                self._make_buckets()

    def _forget_plan(self) -> None:
        """Until the ranks have agreed on one, which is at the end of the next step, nothing is summed before that."""
        self._agreed = False
        self._unseen: set[int] = set()
        self._order, self._sparse_ones = list(range(len(self._trained)))[::-1], [False] * len(self._trained)
        self._make_buckets()

    def _make_buckets(self) -> None:
        """By the plan: the parameters' order, and which of them have sparse gradients."""
        self._sparse = [p for p, is_sparse in zip(self._trained, self._sparse_ones) if is_sparse]
        dense = [self._trained[number] for number in self._order if self.sparse_as_dense or not self._sparse_ones[number]]
        ours = set(dense)
        groups = [[p for p in group if p in ours] for group in self._groups]
        most_bytes = self._tuner.size if self._tuner else context.current().config.fusion_bytes
        if self._compression not in (Compression.none, Compression.fp16, Compression.bf16):
            # A compressor of the user's own may choose another type or shape for every tensor.
            most_bytes, groups = 0, []
        uses_nccl = not self._alone and gpu.is_used(self.process_set)
        # A rank with another plan would be told so by the names of its buckets.
        plan = crc32(repr((self._order, self._sparse_ones)).encode())
        prefix, groups = f"{self._prefix}.{plan:x}", [group for group in groups if group]
        self._buckets = make_buckets(dense, most_bytes, groups, prefix, self._compression, uses_nccl)
        self._overlaps = any(p.is_cuda for p in self._trained) or _can_overlap()
        bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        self._bucket_of = [bucket_of.get(p) for p in self._trained]  # None: its gradient goes as sparse
        self._launched = 0

    def _agree(self) -> None:
        """On the plan: gradients go in the order in which they have come on the first rank, and those that are sparse on any go as sparse.

        Those that have not come are the last; whether they are sparse is seen later. A rank that has joined has no say.
        """
        order = dict.fromkeys([*self._arrived, *reversed(range(len(self._trained)))])
        is_sparse = [n in self._late or (p.grad is not None and p.grad.is_sparse) for n, p in enumerate(self._trained)]
        ever_sparse = [was or now for was, now in zip(self._sparse_ones, is_sparse)]
        has_come = [p.grad is not None for p in self._trained]
        mine = torch.tensor([[[*order], ever_sparse, has_come]], dtype=torch.int64)
        plans = allgather(mine, f"{self._prefix}.plan", self.process_set)
        agreed = plans[0, 0].tolist(), plans[:, 1].amax(0).bool().tolist()
        if agreed != (self._order, self._sparse_ones):
            self._order, self._sparse_ones = agreed
            self._make_buckets()
        self._unseen = set((plans[:, 2].amax(0) == 0).nonzero().flatten().tolist())
        self._agreed = True

    def _agree_anew_for_late_ones(self) -> None:
        """At the end of the next step, if gradients that no rank had had when the ranks agreed have turned out to be sparse on any."""
        late = torch.tensor([bool(self._late & self._unseen)], dtype=torch.uint8)
        if allreduce.allreduce_(late, name=f"{self._prefix}.late", op=allreduce.Max, process_set=self.process_set).item():
            self._agreed = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes after how many backward passes gradients are summed. Not between backward and step."""
        self._require_idle("set_backward_passes_per_step")
        self.backward_passes_per_step = passes
        self._passes_left = [passes] * len(self._trained)

    def _is_under_way(self) -> bool:
        """Whether gradients of an unfinished step have been taken over."""
        return min(self._passes_left, default=self.backward_passes_per_step) < self.backward_passes_per_step

    def _require_idle(self, call: str) -> None:
        if self._is_under_way():
            raise AssertionError(f"{call} was called after loss.backward() but before optimizer.step() or optimizer.synchronize()")

    def _gradient_ready(self, hook: int, parameter: torch.nn.Parameter) -> None:
        """Called for every gradient of every step, when the caches are full of other things: every line of it counts."""
        with self._lock:
            if self._changes_seen != context.changes():
                self._notice_others()
            if self._alone:
                return
            number = self._number_of_hook[hook]
            if number < 0:
                return
            left = self._passes_left[number] - 1
            if left < 0:
                raise AssertionError(
                    "Gradients were computed more than backward_passes_per_step times before call to step(). "
                    "Increase backward_passes_per_step to accumulate gradients locally."
                )
            self._passes_left[number] = left
            if left:
                return
            if not self._agreed:
                self._arrived.append(number)
                return
            bucket = self._bucket_of[number]
            if bucket is None:
                return
            if bucket.take(parameter):
                self._fill(bucket)
            if self._overlaps:
                self._launch_complete()

    def _fill(self, bucket: Bucket) -> None:
        for parameter in bucket.unfilled:
            gradient = parameter.grad
            if gradient is None:
                parameter.grad = torch.zeros_like(parameter)  # unused on this rank: it counts as zero
            elif gradient.is_sparse:
                self._note_late(parameter)
                parameter.grad = gradient.to_dense()
        if bucket.unfilled:
            bucket.fill()

    def _note_late(self, parameter: torch.nn.Parameter) -> None:
        number = self._number_of[parameter]
        if number not in self._late | self._unseen and not self.sparse_as_dense:
            warnings.warn(
                f"the gradient of {self._parameter_names[parameter]} was dense in the first step and is sparse now: it is made dense to be "
                "summed. sparse_as_dense=True says that this is wanted",
                stacklevel=2,
            )
        self._late.add(number)

    def _launch_complete(self) -> None:
        """Starts the buckets that are complete, in their order; not the last one."""
        while self._launched < len(self._buckets) - 1 and self._buckets[self._launched].is_complete():
            bucket = self._buckets[self._launched]
            self._fill(bucket)
            bucket.start_sum(self._how())
            self._launched += 1

    def _how(self) -> dict[str, Any]:
        return {
            "op": self.op,
            "prescale_factor": self._prescale,
            "postscale_factor": self._postscale,
            "process_set": self.process_set,
        }

    def _start_sparse(self, parameter: torch.nn.Parameter) -> int:
        gradient = None if parameter.grad is None else parameter.grad.detach()
        if gradient is None or not gradient.is_sparse:
            rows = torch.zeros((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device)
            nowhere = torch.zeros((1, 0), dtype=torch.int64, device=parameter.device)
            empty = torch.sparse_coo_tensor(nowhere, rows, parameter.shape, check_invariants=False)
            gradient = empty if gradient is None else gradient.to_sparse(1)
        return sparse_allreduce_async(gradient, f"{self._prefix}.{self._parameter_names[parameter]}", self.op, self.process_set)

    def synchronize(self) -> None:
        """Waits until all gradients are reduced and writes them into ``p.grad``. Parameters without one count as zero."""
        self._notice_others()
        try:
            if not self._alone:
                self._reduce()
            self._synchronized = True
        finally:
            self._begin_anew()
        if self._tuner and self._tuner.step_done():
            self._make_buckets()

    def _reduce(self) -> None:
        how = self._how()
        sparse: list[tuple[torch.nn.Parameter, int]] = []
        newcomers = self._newcomers()
        with self._lock:
            if newcomers and not self._agreed:
                self._take_on(newcomers)
                newcomers = []
            if not self._agreed and self._trained:
                self._agree()
            if not self.sparse_as_dense:
                sparse += [(parameter, self._start_sparse(parameter)) for parameter in self._sparse]
            for bucket in self._buckets:
                bucket.take_rest()
                self._fill(bucket)
            if self._overlaps:
                self._launch_complete()

        def finish_sparse(parameter: torch.nn.Parameter, handle: int) -> None:
            parameter.grad = handles.synchronize(handle)

        def forget_handles() -> None:
            for bucket in self._buckets:
                bucket.handle = 0

        # After a failure the others still run to their end, on all ranks alike.
        handles.results_of(
            [
                *(partial(bucket.sum_here, how) for bucket in self._buckets if not bucket.handle),
                *(partial(handles.synchronize, bucket.handle) for bucket in self._buckets if bucket.handle),
                *(partial(finish_sparse, parameter, handle) for parameter, handle in sparse),
                forget_handles,
            ]
        )
        for bucket in self._buckets:
            bucket.empty()
        # There are optimizers that want sparse ones. Only by what all ranks know: dense and sparse steps round differently.
        for parameter in self._trained if isinstance(self, torch.optim.SparseAdam) else self._sparse:
            if not parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_sparse(1)
        if self._unseen:
            self._agree_anew_for_late_ones()
        if newcomers:
            self._reduce_alone(newcomers)
            self._take_on(newcomers)

    def _newcomers(self) -> list[torch.nn.Parameter]:
        """Parameters that were added to the optimizer, or made to be trained, after it was distributed."""
        trained = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        if len(trained) == len(self._trained) and all(map(is_, trained, self._trained)):
            return []
        return [p for p in trained if p not in self._number_of]

    def _reduce_alone(self, newcomers: list[torch.nn.Parameter]) -> None:
        """Their first gradients, where the ranks had agreed on a plan without them."""
        for number, parameter in enumerate(newcomers):
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            parameter.grad = allreduce.allreduce_(dense, name=f"{self._prefix}.new.{number}", **self._how())
            if isinstance(self, torch.optim.SparseAdam):
                parameter.grad = parameter.grad.to_sparse(1)

    def _take_on(self, newcomers: list[torch.nn.Parameter]) -> None:
        """Forgets the plan, for one with them in their places: a rank that does it later, or was made with them, has the same order."""
        listed = [p for group in self.param_groups for p in group["params"]]
        for place, parameter in enumerate(listed):
            self._parameter_names.setdefault(parameter, f"added.{place}")
        arrived, known = [self._trained[number] for number in self._arrived], {*self._trained, *newcomers}
        self._trained = [p for p in listed if p in known]
        self._number_of = {parameter: number for number, parameter in enumerate(self._trained)}
        self._arrived = [self._number_of[parameter] for parameter in arrived]
        self._late.clear()
        self._listen(newcomers)
        self._forget_plan()

    def _begin_anew(self) -> None:
        """Forgets what is left of a step: also after a failure the next one begins with nothing under way."""
        for bucket in self._buckets:
            bucket.reset()
        self._arrived.clear()
        self._launched = 0
        self._passes_left = [self.backward_passes_per_step] * len(self._trained)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """The wrapped optimizer's own; what was under way of a step is dropped."""
        self._begin_anew()
        self._synchronized = False
        super(self.__class__, self).load_state_dict(*args, **kwargs)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """``step`` inside this context does not synchronize: for scripts that call ``synchronize`` themselves."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The wrapped optimizer's own, on reduced gradients: those of ``backward``, or those that ``closure`` computes at every call.

        What the closure returns is reduced like the gradients, so that all ranks decide alike what depends on the loss (LBFGS).
        """
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
                    "This can cause training slowdown. You may want to consider using optimizer.skip_synchronize() context if "
                    "you use optimizer.synchronize() in your code.",
                    stacklevel=2,
                )
            if closure is None or self._is_under_way():
                self.synchronize()
            if closure is not None:
                closure = partial(self._evaluate, closure)
        try:
            return super(self.__class__, self).step(closure)
        finally:
            self._synchronized = False

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """Calls the closure of a step and reduces what it leaves."""
        loss = closure()
        # One that only returns a loss leaves nothing: its gradients came before the step.
        if self._is_under_way() or not self._synchronized:
            self.synchronize()
            self._synchronized = False  # of another call's gradients
        is_number = isinstance(loss, (int, float)) or (torch.is_tensor(loss) and loss.numel() == 1)
        if self._alone or not is_number:
            return loss
        reduced = loss.detach().clone() if torch.is_tensor(loss) else torch.tensor(float(loss), dtype=torch.float64)
        return allreduce.allreduce_(reduced, name=f"{self._prefix}.loss", op=self.op, process_set=self.process_set)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        if self._is_under_way():
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or optimizer.synchronize(). "
                "This is prohibited as it can cause a race condition."
            )
        super(self.__class__, self).zero_grad(*args, **kwargs)


# PyTorch wraps `step` of a class to run its hooks, once; the wrapped optimizer's own step, which this one calls, is wrapped already.
_DistributedOptimizer.step.hooked = True  # type: ignore[attr-defined]


def _can_overlap() -> bool:
    """Whether sums beside the backward pass can save time: not where all cores compute and there is no network to wait for.

    Two threads of a rank would only take the core from each other, and those of other ranks wait for both.
    """
    member, cores, allowed = context.current(), os.cpu_count() or 1, len(os.sched_getaffinity(0))
    own = allowed if allowed < cores else cores // member.local_size
    return member.cross_size > 1 or torch.get_num_threads() < own


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
) -> Any:
    """The optimizer, with gradients that are averaged (``op``) over all ranks before every step.

    The result is an instance of the optimizer's own class with its state and options. ``backward_passes_per_step``:
    gradients of so many passes are added up locally before they are summed over the ranks. ``gradient_predivide_factor``
    splits the division of an average: by the factor before the sum, by size / factor after it. ``groups``: lists of
    parameters, or a number of groups (``num_groups`` is its old name), that are summed together; other parameters are, in
    buckets of COLLECTIVE_FUSION_MB. ``sparse_as_dense``: sparse gradients are made dense to be summed, otherwise rows
    are gathered; the optimizer finds sparse ones. With ``op=Adasum``, what the optimizer adds to the parameters is combined, not
    the gradients.
    """
    if op not in (allreduce.Average, allreduce.Sum, allreduce.Adasum):
        raise ValueError(f"DistributedOptimizer takes op Average, Sum or Adasum, not {op!r}")
    if gradient_predivide_factor != 1.0 and op != allreduce.Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if backward_passes_per_step < 1:
        raise ValueError("backward_passes_per_step must be at least 1")
    if op == allreduce.Adasum:
        return distribute_with_adasum(optimizer, named_parameters, compression, backward_passes_per_step, process_set)
    cls: Any = type(optimizer.__class__.__name__, (optimizer.__class__,), dict(_DistributedOptimizer.__dict__))
    wrapped: Any = cls.__new__(cls)
    wrapped.__dict__.update(optimizer.__dict__)
    wrapped.__dict__.pop("step", None)  # a scheduler made earlier has bound the unwrapped step here
    wrapped._distribute(
        named_parameters,
        compression,
        backward_passes_per_step,
        op,
        gradient_predivide_factor,
        groups,
        num_groups,
        sparse_as_dense,
        process_set,
    )
    return wrapped
