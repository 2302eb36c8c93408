"""Sums an optimizer's gradients over all ranks, while the backward pass still runs where that saves time.

A hook on every parameter notes when its gradient is ready. The first step notes the order in which they come, and at its end the ranks
agree on one plan (plan.py). From then on a bucket is submitted to the engine when all its gradients are
ready and all earlier buckets have gone (buckets.py says why in this order). The last one is complete when the pass ends and has nothing
to overlap with: ``synchronize`` sums it in its own thread, without waking another, and waits for the others. Where the ranks of a single
host compute on all its cores, there is nothing to overlap with either (:func:`handles.can_overlap`): ``synchronize`` sums all of them.
"""

from __future__ import annotations

import threading
import warnings
from functools import partial
from operator import is_
from typing import Any, Callable, Iterable

import torch

from collective_core.lazy import extension
from collective_core.runtime import launchers, membership
from collective_core.runtime.process_sets import ProcessSet
from collective_core.torch import gpu, handles
from collective_core.torch.compiling import is_traced
from collective_core.torch.compression import Compression, LossyCompression
from collective_core.torch.ops import allreduce
from collective_core.torch.ops.sparse import sparse_allreduce_async
from collective_core.torch.optimizer.buckets import groups_of, make_buckets
from collective_core.torch.optimizer.hooks import on_gradient
from collective_core.torch.optimizer.names import is_alone, names_of, number_of_optimizer
from collective_core.torch.optimizer.plan import Plan, agree


class Reducer:
    """Listens to the gradients of some parameters, and reduces them. Ranks make theirs of a process set in one order.

    Args:
        parameters: the optimizer's; those that are trained are listened to.
        named_parameters: as :func:`DistributedOptimizer` takes them, like the rest.
        passes: backward passes whose gradients are added up before they are reduced.
        how: the keyword arguments of an allreduce.
        wants_sparse: whether gradients become sparse in the end, also where they came as dense ones.
        as_views: whether gradients are views of buckets.
    """

    def __init__(
        self,
        parameters: list[torch.nn.Parameter],
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
        compression: Any,
        passes: int,
        how: dict[str, Any],
        groups: Any,
        num_groups: int,
        sparse_as_dense: bool,
        wants_sparse: bool,
        as_views: bool = True,
    ) -> None:
        self.passes = passes
        self.is_done = False  # whether what is in p.grad has been reduced; the optimizer takes it back when it has used that
        is_lossy = isinstance(compression, LossyCompression)
        self.error_feedback = compression.error_feedback(how) if is_lossy else None
        self._compression = Compression.none if is_lossy else compression
        self.how = how
        self.process_set: ProcessSet = how["process_set"]
        self.sparse_as_dense = sparse_as_dense
        self._wants_sparse = wants_sparse
        self._as_views = as_views
        self._lock = threading.Lock()  # hooks may run in autograd's threads

        self.is_alone = is_alone(self.process_set)
        self._prefix = number_of_optimizer("gradients", self.process_set, self.revoke)
        self.names = names_of(parameters, named_parameters)
        self._trained = [p for p in parameters if p.requires_grad]
        self._number_of = {parameter: number for number, parameter in enumerate(self._trained)}
        self._groups = groups_of(self._trained, groups, num_groups)
        self._generation, self._changes_seen = membership.generation(), membership.changes()
        self._end_hooks: list[Callable[[], None]] = []
        self._hooked: list[torch.nn.Parameter] = []
        self._number_of_hook: list[int] = []  # a parameter's number changes when others are taken on, its hook stays
        self._joins = membership.joins(self._set_number())
        # Ranks that come to an elastic job later would begin to tune when the others have chosen.
        wants_tuning = membership.current().config.autotune and not self.is_alone and bool(self._trained) and not launchers.is_elastic()
        tuner = extension("autotune").BucketTuner if wants_tuning else None
        self.tuner = tuner(self._trained, compression, self._prefix, self.process_set) if tuner else None
        self._arrived: list[int] = []  # while there is no plan
        self._late: set[int] = set()  # parameters whose gradients turned out to be sparse after the ranks had agreed
        self._forget_plan()
        self.begin_anew()
        if not self.is_alone or launchers.is_elastic():
            self._listen(self._trained)

    # --- what the optimizer calls

    def synchronize(self, parameters: list[torch.nn.Parameter]) -> None:
        """Waits until all gradients are reduced and writes them into ``p.grad``.

        A rank without one counts as zero; where no rank has one it stays None.

        Args:
            parameters: the optimizer's as they are now: some may have been added, or made to be trained.
        """
        self._notice_others()
        try:
            if not self.is_alone:
                self._reduce(parameters)
            self.is_done = True
        finally:
            self.begin_anew()
        if self.tuner and self.tuner.step_done():
            self._make_buckets()

    def reduced(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Another tensor, in place, like the gradients."""
        if self.is_alone:
            return tensor
        return allreduce.allreduce_(tensor, name=f"{self._prefix}.{name}", **self.how)

    def is_under_way(self) -> bool:
        """Whether gradients of an unfinished step have been taken over."""
        return min(self._passes_left, default=self.passes) < self.passes

    def begin_anew(self) -> None:
        """Forgets what is left of a step: also after a failure the next one begins with nothing under way."""
        for bucket in self.buckets:
            bucket.reset()
        self._arrived.clear()
        self._launched = 0
        self._passes_left = [self.passes] * len(self._trained)

    def revoke(self) -> None:
        """Another optimizer is to have the parameters: no gradient is taken any more before ``synchronize``."""
        for end in self._end_hooks:
            end()
        self.begin_anew()

    # --- while gradients come

    def _listen(self, parameters: list[torch.nn.Parameter]) -> None:
        self._end_hooks += [on_gradient(p, partial(self._gradient_ready, len(self._hooked) + i)) for i, p in enumerate(parameters)]
        self._hooked += parameters
        self._number_of_hook = [self._number_of.get(p, -1) for p in self._hooked]  # -1: the user has taken it out

    def _gradient_ready(self, hook: int, _parameter: torch.nn.Parameter) -> None:
        """Called for every gradient of every step, when the caches are full of other things: every line of it counts."""
        if is_traced():  # which knows no locks; what nobody has noted is taken when the pass has ended
            return
        with self._lock:
            if self._changes_seen != membership.changes():
                self._notice_others()
            if self.is_alone:
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
            place = self._place_of[number]
            if place is None:
                return
            bucket, position = place
            if bucket.take(position):
                bucket.fill(self._note_late)
            if self._overlaps:
                self._launch_complete()

    def _note_late(self, parameter: torch.nn.Parameter) -> None:
        number = self._number_of[parameter]
        if number not in self._late | self._plan.unseen and not self.sparse_as_dense:
            warnings.warn(
                f"the gradient of {self.names[parameter]} was dense in the first step and is sparse now: it is made dense to be "
                "summed. sparse_as_dense=True says that this is wanted",
                stacklevel=2,
            )
        self._late.add(number)

    def _launch_complete(self) -> None:
        """Starts the buckets that are complete, in their order; not the last one."""
        while self._launched < len(self.buckets) - 1 and self.buckets[self._launched].is_complete():
            bucket = self.buckets[self._launched]
            bucket.fill(self._note_late)
            bucket.start_sum(self.how)
            self._launched += 1

    # --- when all have come

    def _reduce(self, parameters: list[torch.nn.Parameter]) -> None:
        sparse: list[tuple[torch.nn.Parameter, int]] = []
        newcomers = self._newcomers(parameters)
        with self._lock:
            if newcomers and not self._agreed:
                self._assign(newcomers, parameters)
                newcomers = []
            if not self._agreed and self._trained:
                self._agree()
            if not self.sparse_as_dense:
                sparse += [(parameter, self._start_sparse(parameter)) for parameter in self._sparse]
            for bucket in self.buckets:
                bucket.take_rest()
                bucket.fill(self._note_late)
            if self._overlaps:
                self._launch_complete()

        def finish_sparse(parameter: torch.nn.Parameter, handle: int) -> None:
            total = handles.synchronize(handle)
            parameter.grad = total if total._nnz() else None  # no rank has rows of it: as if none had used it

        def forget_handles() -> None:
            for bucket in self.buckets:
                bucket.handle = 0

        here = [partial(bucket.sum_here, self.how) for bucket in self.buckets if not bucket.handle]
        if self.error_feedback is not None and self.buckets:
            here = [partial(self.error_feedback.reduce, self.buckets)]
        # After a failure the others still run to their end, on all ranks alike.
        handles.results_of(
            [
                *here,
                *(partial(handles.synchronize, bucket.handle) for bucket in self.buckets if bucket.handle),
                *(partial(finish_sparse, parameter, handle) for parameter, handle in sparse),
                forget_handles,
            ]
        )
        for bucket in self.buckets:
            bucket.empty()
        # There are optimizers that want sparse ones. Only by what all ranks know: dense and sparse steps round differently.
        for parameter in self._trained if self._wants_sparse else self._sparse:
            if parameter.grad is not None and not parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_sparse(1)
        if self._plan.unseen:
            self._agree_anew_for_late_ones()
        if newcomers:
            self._reduce_alone(newcomers)
            self._assign(newcomers, parameters)

    def _start_sparse(self, parameter: torch.nn.Parameter) -> int:
        gradient = None if parameter.grad is None else parameter.grad.detach()
        if gradient is None or not gradient.is_sparse:
            rows = torch.zeros((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device)
            nowhere = torch.zeros((1, 0), dtype=torch.int64, device=parameter.device)
            empty = torch.sparse_coo_tensor(nowhere, rows, parameter.shape, check_invariants=False)
            gradient = empty if gradient is None else gradient.to_sparse(1)
        return sparse_allreduce_async(gradient, f"{self._prefix}.{self.names[parameter]}", self.how["op"], self.process_set)

    # --- the plan

    def _forget_plan(self) -> None:
        """Until the ranks have agreed on one, which is at the end of the next step, nothing is summed before that."""
        self._agreed = False
        self._plan = Plan.until_agreed(len(self._trained))
        self._make_buckets()

    def _agree(self) -> None:
        last = self._plan
        self._plan = agree(last, self._trained, self._arrived, self._late, f"{self._prefix}.plan", self.process_set)
        if self._plan[:2] != last[:2]:
            self._make_buckets()
        self._agreed = True

    def _agree_anew_for_late_ones(self) -> None:
        """At the end of the next step, if gradients that no rank had had when the ranks agreed have turned out to be sparse on any."""
        late = torch.tensor([bool(self._late & self._plan.unseen)], dtype=torch.uint8)
        if allreduce.allreduce_(late, name=f"{self._prefix}.late", op=allreduce.Max, process_set=self.process_set).item():
            self._agreed = False

    def _make_buckets(self) -> None:
        plan = self._plan
        self._sparse = [p for p, is_sparse in zip(self._trained, plan.is_sparse) if is_sparse]
        dense = [self._trained[number] for number in plan.order if self.sparse_as_dense or not plan.is_sparse[number]]
        ours = set(dense)
        groups = [[p for p in group if p in ours] for group in self._groups]
        most_bytes = self.tuner.size if self.tuner else membership.current().config.fusion_bytes
        if self._compression not in (Compression.none, Compression.fp16, Compression.bf16):
            # A compressor of the user's own may choose another type or shape for every tensor.
            most_bytes, groups = 0, []
        prefix, groups = f"{self._prefix}.{plan.mark()}", [group for group in groups if group]
        self.buckets = make_buckets(dense, most_bytes, groups, prefix, self._compression, self._as_views)
        # A compressed sum is several operations, of which the program's thread prepares each.
        self._overlaps = self.error_feedback is None and (any(map(gpu.holds, self._trained)) or handles.can_overlap())
        places = {p: (bucket, position) for bucket in self.buckets for position, p in enumerate(bucket.parameters)}
        self._place_of = [places.get(p) for p in self._trained]  # None: its gradient goes as sparse
        self._launched = 0

    # --- ranks and parameters that come and go

    def _set_number(self) -> int:
        return self.process_set.process_set_id or 0

    def _notice_others(self) -> None:
        """Before anything of a step: in an elastic job the ranks may have changed, and after a join their tuning may differ."""
        self._changes_seen = membership.changes()
        if self._generation != membership.generation():
            # Perhaps from one or to one; and whatever was under way is not.
            self._generation = membership.generation()
            self.begin_anew()
            self.is_done = False
            self.is_alone = is_alone(self.process_set)
            self._forget_plan()
        elif self._joins != membership.joins(self._set_number()):
            self._joins = membership.joins(self._set_number())
            self._agreed = False  # a rank that had joined before its first step knows no plan
            if self.tuner and self.tuner.give_up():
                self._make_buckets()

    def _newcomers(self, parameters: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        """Parameters that were added to the optimizer, or made to be trained, after it was distributed."""
        trained = [p for p in parameters if p.requires_grad]
        if len(trained) == len(self._trained) and all(map(is_, trained, self._trained)):
            return []
        return [p for p in trained if p not in self._number_of]

    def _reduce_alone(self, newcomers: list[torch.nn.Parameter]) -> None:
        """Their first gradients, where the ranks had agreed on a plan without them."""
        used = torch.tensor([parameter.grad is not None for parameter in newcomers], dtype=torch.uint8)
        allreduce.allreduce_(used, name=f"{self._prefix}.new.used", op=allreduce.Max, process_set=self.process_set)
        for number, (parameter, is_used) in enumerate(zip(newcomers, used.tolist())):
            if not is_used:
                continue
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            parameter.grad = self.reduced(dense, f"new.{number}")
            if self._wants_sparse:
                parameter.grad = parameter.grad.to_sparse(1)

    def _assign(self, newcomers: list[torch.nn.Parameter], parameters: list[torch.nn.Parameter]) -> None:
        """Forgets the plan, for one with them in their places: a rank that does it later, or was made with them, has the same order."""
        for number, parameter in enumerate(parameters):
            self.names.setdefault(parameter, f"added.{number}")
        arrived, known = [self._trained[number] for number in self._arrived], {*self._trained, *newcomers}
        self._trained = [p for p in parameters if p in known]
        self._number_of = {parameter: number for number, parameter in enumerate(self._trained)}
        self._arrived = [self._number_of[parameter] for parameter in arrived]
        self._late.clear()
        self._listen(newcomers)
        self._forget_plan()
