"""Training on slow networks: ranks train apart for many steps, and what they have changed is averaged (LocalSGD, DiLoCo).

Between synchronisations each rank makes steps of its own with the inner optimizer. A synchronisation averages over all ranks by how much
each has moved from the outer parameters, which are the same everywhere; the outer optimizer takes that as a gradient for a step of the
outer parameters, from which the ranks go on.

Sources: Local SGD, arXiv 1805.09767; DiLoCo, arXiv 2311.08105; fragments, overlap and merging, Streaming DiLoCo, arXiv 2501.18512.
"""

from __future__ import annotations

import copy
from typing import Any, Callable, Sequence
from zlib import crc32

import torch

from collective_core.errors import CollectiveError
from collective_core.extensions.slow_networks import compressed
from collective_core.extensions.slow_networks.fragments import divide, schedule
from collective_core.runtime import membership
from collective_core.runtime.process_sets import ProcessSet
from collective_core.torch.compiling import not_compiled
from collective_core.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    load_in_place,
)
from collective_core.torch.sharded import is_shard

#: DiLoCo's outer optimizer: SGD with Nesterov momentum, as in the paper.
OUTER_LEARNING_RATE, OUTER_MOMENTUM = 0.7, 0.9
#: Bits of an outer delta's elements on their way.
BITS = (32, 8, 4)


class _Fragment:
    """Parameters that are synchronised together."""

    def __init__(self, parameters: list[torch.nn.Parameter], next_start: int) -> None:
        self.parameters = parameters
        self.outer = [p.detach().clone() for p in parameters]  # where the ranks went from, the same everywhere
        self.residual: torch.Tensor | None = None  # what this rank's deltas have left out
        self.next_start = next_start
        self.exchange: compressed.Exchange | None = None
        self.started = self.advances = 0


class DiLoCo:
    """Trains ``model`` with ``inner`` on each rank by itself, and every ``sync_every`` steps makes one step of ``outer`` together.

    Call :meth:`step` where a program calls the optimizer's, and :meth:`synchronize` after the last one. All ranks make as many steps, and
    begin with the same parameters (``broadcast_parameters``). Buffers (of batch normalisation, say) stay each rank's own.

    Args:
        inner: a plain optimizer of the model's parameters, or a DistributedOptimizer over a process set of ranks that are near each other.
        outer: a plain optimizer of the same parameters, by default SGD with learning rate 0.7 and Nesterov momentum 0.9.
        fragments: how many parts of about equal size the model is synchronised in, one after the other; or lists of parameters.
        delay: for how many steps a fragment's sum goes on while the ranks train, before it is merged.
        alpha: the share of a rank's own parameters in what it goes on from; by default 0, and with a delay 0.5, as in the paper, because
            with 0 a fragment's own steps since its sum began are lost.
        bits: of each element of an outer delta on its way: 32 (float32), 8 or 4; what rounding leaves out is added to the next delta (error
            feedback).

    Raises ValueError for settings that make no sense.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        inner: torch.optim.Optimizer,
        outer: torch.optim.Optimizer | None = None,
        *,
        sync_every: int,
        fragments: int | Sequence[Sequence[torch.nn.Parameter]] = 1,
        delay: int = 0,
        alpha: float | None = None,
        bits: int = 32,
        process_set: ProcessSet | None = None,
    ) -> None:
        trained = [p for p in model.parameters() if p.requires_grad]
        if any(map(is_shard, trained)):
            raise ValueError("sharded tables take every step together: give DiLoCo or LocalSGD a module without them")
        self._schedule = schedule(sync_every, fragments if isinstance(fragments, int) else len(fragments), delay)
        if bits not in BITS:
            raise ValueError(f"bits of an outer delta's elements: {', '.join(map(str, BITS))}, not {bits}")
        if alpha is not None and not 0 <= alpha < 1:
            raise ValueError(f"alpha is the share of a rank's own parameters, at least 0 and below 1, not {alpha}")
        if outer is None:
            outer = torch.optim.SGD(trained, lr=OUTER_LEARNING_RATE, momentum=OUTER_MOMENTUM, nesterov=True)
        if hasattr(outer, "_distribute"):
            raise ValueError("outer must be a plain optimizer, not a DistributedOptimizer: what it steps with is averaged already")
        if not {p for group in outer.param_groups for p in group["params"]} >= set(trained):
            raise ValueError("outer must have all trained parameters of the model: torch.optim.SGD(model.parameters(), …)")
        if isinstance(fragments, int):
            parts = [[trained[number] for number in part] for part in divide([p.numel() for p in trained], fragments)]
        else:
            parts = [list(part) for part in fragments]
            listed = [p for part in parts for p in part]
            if len(listed) != len(trained) or set(listed) != set(trained) or not all(parts):
                raise ValueError("fragments must have every trained parameter of the model once, and none may be empty")
        if any(not p.is_floating_point() for p in trained):
            raise ValueError("parameters must be real floating-point numbers")
        self.model, self.inner, self.outer = model, inner, outer
        self.process_set = process_set
        self._bits = bits
        self._alpha = alpha if alpha is not None else (0.5 if delay else 0.0)
        self._fragments = [_Fragment(part, self._schedule.next_start(n, 0)) for n, part in enumerate(parts)]
        self._step = self._merged = 0  # steps, and merged fragments
        self._compared = False  # whether all ranks are known to begin with the same parameters

    @not_compiled
    def step(self, closure: Callable[[], Any] | None = None, state: Any = None) -> Any:
        """``inner.step``, then what is due of a synchronisation. Returns what ``inner.step`` does.

        ``state``: an elastic job's, with this object as a part. It is saved before the other ranks are waited for, so that when one of them
        is lost no step of the others is, and committed when something has been merged.
        """
        if not self._step:
            self._begin()
        result = self.inner.step(closure) if closure is not None else self.inner.step()
        self.count_step(state)
        return result

    @not_compiled
    def count_step(self, state: Any = None) -> None:
        """What is due after a step that the program has made itself, with a GradScaler for instance, whether or not that left it out.

        Then the parameters are broadcast before this object is made: it goes from those that it finds.
        """
        self._step += 1
        going = [f for f in self._fragments if f.exchange is not None and self._step >= self._due(f)]
        starting = [f for f in self._fragments if f.exchange is None and self._step >= f.next_start]
        if not going and not starting:
            return
        if state is not None:
            state.save()
        for fragment in going:
            self._advance(fragment)
        for fragment in starting:
            self._start(fragment)
        merged = self._merged
        if not self._schedule.delay:
            self._finish(starting)
        else:
            self._finish([fragment for fragment in going if self._step >= fragment.started + self._schedule.delay])
        if state is not None and self._merged > merged:
            state.commit()

    @not_compiled
    def synchronize(self) -> None:
        """Synchronises the whole model now: afterwards all ranks have the same parameters, the outer ones. Collective."""
        self._finish([fragment for fragment in self._fragments if fragment.exchange is not None])
        for fragment in self._fragments:
            self._start(fragment)
        self._finish(self._fragments, alpha=0.0)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """The inner optimizer's."""
        self.inner.zero_grad(*args, **kwargs)

    # --- one synchronisation

    def _begin(self) -> None:
        """Before the first step, which a broadcast may precede: the model's parameters are the outer ones."""
        with torch.no_grad():
            for outer, p in self._pairs():
                outer.copy_(p)

    def _pairs(self) -> list[tuple[torch.Tensor, torch.nn.Parameter]]:
        return [pair for fragment in self._fragments for pair in zip(fragment.outer, fragment.parameters)]

    def _compare(self) -> None:
        """Once: ranks that begin with different parameters would go on with different ones for ever."""
        if self._compared:
            return
        checksum = 0
        for outer, _ in self._pairs():
            checksum = crc32(outer.cpu().contiguous().reshape(-1).view(torch.uint8).numpy(), checksum)
        if len(set(allgather_object(checksum, "diloco.begin", self.process_set))) > 1:
            text = "the ranks have begun with different parameters: call hvd.broadcast_parameters(model.state_dict(), root_rank=0) before "
            raise CollectiveError(text + "hvd.DiLoCo or hvd.LocalSGD is made", "mismatch")
        self._compared = True

    def _operations(self) -> int:
        """How many may follow each other in a sum."""
        return 1 if self._bits == 32 else 2

    def _due(self, fragment: _Fragment) -> int:
        """The step at whose end the fragment's operation that is under way is waited for, the same on all ranks."""
        return fragment.started + -(-self._schedule.delay * (fragment.advances + 1) // self._operations())

    def _start(self, fragment: _Fragment) -> None:
        self._compare()
        with torch.no_grad():
            deltas = [(outer - p.detach()).reshape(-1).float() for outer, p in zip(fragment.outer, fragment.parameters)]
        delta = torch.cat(deltas)
        number = self._fragments.index(fragment)
        name = f"diloco.{number}"
        if self._bits == 32:
            steps = compressed.whole(delta, name, self.process_set)
        else:
            if fragment.residual is not None:
                delta += fragment.residual
            steps = compressed.quantized(delta, self._bits, name, self.process_set)
        fragment.exchange, fragment.started, fragment.advances = compressed.Exchange(steps), self._step, 0
        fragment.next_start = self._schedule.next_start(number, self._step)

    def _advance(self, fragment: _Fragment) -> bool:
        assert fragment.exchange is not None  # noqa: S101 - of those that are under way
        fragment.advances += 1
        return fragment.exchange.mean is not None or fragment.exchange.advance()

    def _finish(self, fragments: Sequence[_Fragment], alpha: float | None = None) -> None:
        """Waits for their sums, and merges them: all of them or, after a failure, none."""
        going = list(fragments)
        while going:
            going = [fragment for fragment in going if not self._advance(fragment)]
        if fragments:
            self._merge(fragments, self._alpha if alpha is None else alpha)

    def _merge(self, fragments: Sequence[_Fragment], alpha: float) -> None:
        trained = [p for fragment in self._fragments for p in fragment.parameters]
        gradients = [p.grad for p in trained]  # of the program
        local = [[p.detach().clone() for p in fragment.parameters] if alpha else [] for fragment in fragments]
        for p in trained:
            p.grad = None  # an optimizer leaves these alone
        with torch.no_grad():
            for fragment in fragments:
                mean = fragment.exchange.mean if fragment.exchange is not None else None
                assert mean is not None  # noqa: S101 - _finish has waited
                parts = mean.values.split([p.numel() for p in fragment.parameters])
                for p, outer, part in zip(fragment.parameters, fragment.outer, parts):
                    p.copy_(outer)
                    p.grad = part.view(p.shape).to(p.dtype)
                if self._bits != 32:
                    fragment.residual = mean.residual
                fragment.exchange = None
        self.outer.step()
        with torch.no_grad():
            for fragment, own in zip(fragments, local):
                for p, outer in zip(fragment.parameters, fragment.outer):
                    outer.copy_(p)
                for p, mine in zip(fragment.parameters, own):
                    p.lerp_(mine, alpha)
        for p, gradient in zip(trained, gradients):
            p.grad = gradient
        self._merged += len(fragments)

    # --- state: outer parameters and momentum are all ranks', the rest is each rank's own

    def state_dict(self) -> dict[str, Any]:
        """Model, both optimizers, outer parameters, what this rank's deltas have left out, and where in the schedule it is.

        Sums that are under way are not in it: when it is loaded, what they were to bring is in the next.
        """
        return {
            "model": self.model.state_dict(),
            "inner": self.inner.state_dict(),
            "outer": self.outer.state_dict(),
            "outer_parameters": [list(fragment.outer) for fragment in self._fragments],
            "residuals": [fragment.residual for fragment in self._fragments],
            "next_starts": [fragment.next_start for fragment in self._fragments],
            "rank": membership.rank() if membership.is_initialized() else None,
            "step": self._step,
            "merged": self._merged,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Another rank's residuals are not taken: this rank begins without. Raises ValueError for another division into fragments."""
        shapes = [[tuple(p.shape) for p in fragment.parameters] for fragment in self._fragments]
        if [[tuple(outer.shape) for outer in part] for part in state["outer_parameters"]] != shapes:
            raise ValueError("the state is of a model that was divided into other fragments: pass the same fragments as when it was saved")
        self.elastic_reset()
        self.model.load_state_dict(state["model"])
        load_in_place(self.inner, copy.deepcopy(state["inner"]))
        load_in_place(self.outer, copy.deepcopy(state["outer"]))
        is_own = state["rank"] == (membership.rank() if membership.is_initialized() else None)
        for n, fragment in enumerate(self._fragments):
            pairs = zip(fragment.parameters, state["outer_parameters"][n])
            fragment.outer = [outer.detach().to(p.device, p.dtype, copy=True) for p, outer in pairs]
            residual = state["residuals"][n] if is_own else None
            fragment.residual = None if residual is None else residual.to(fragment.parameters[0].device, copy=True)
            fragment.next_start = state["next_starts"][n]
        self._step, self._merged = state["step"], state["merged"]

    def elastic_reset(self) -> None:
        """Gives up sums that are under way: what they were to bring is in the next ones."""
        for fragment in self._fragments:
            if fragment.exchange is not None:
                fragment.exchange.drop()
            fragment.exchange = None

    def elastic_sync(self, root: int) -> None:
        """When ranks have come or gone: whoever has merged what ``root`` has goes on with its own parameters; others, and ranks that have
        just come, begin from the outer ones, with the root's optimizer states. Collective."""
        self.elastic_reset()
        if not self._step:
            self._begin()
        place = (self._step, self._merged)
        starts = [fragment.next_start for fragment in self._fragments]
        theirs, starts = broadcast_object((place, starts), root, "diloco.place", self.process_set)
        keeps = self._step > 0 and place == theirs
        own = copy.deepcopy(self.inner.state_dict()) if keeps else None
        outer = [tensor for tensor, _ in self._pairs()]
        others = [*self.model.buffers(), *(p.detach() for p in self.model.parameters() if not p.requires_grad)]
        others = [tensor.clone() if keeps else tensor for tensor in others]
        broadcast_parameters([(f"diloco.outer.{n}", tensor) for n, tensor in enumerate(outer)], root, self.process_set)
        broadcast_parameters([(f"diloco.other.{n}", tensor) for n, tensor in enumerate(others)], root, self.process_set)
        broadcast_optimizer_state(self.outer, root, process_set=self.process_set)
        broadcast_optimizer_state(self.inner, root, process_set=self.process_set)
        self.inner.zero_grad(set_to_none=True)  # of a step that was cut off, or made to have a state
        self._compared = True
        if keeps:
            load_in_place(self.inner, own)
            return
        with torch.no_grad():
            for fragment, start in zip(self._fragments, starts):
                fragment.next_start, fragment.residual = start, None
                for p, value in zip(fragment.parameters, fragment.outer):
                    p.copy_(value)
        self._step, self._merged = theirs


class LocalSGD(DiLoCo):
    """Every ``sync_every`` steps the ranks' parameters are averaged: a :class:`DiLoCo` whose outer step takes the mean as it is."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, sync_every: int, **options: Any) -> None:
        outer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
        super().__init__(model, optimizer, outer, sync_every=sync_every, **options)
