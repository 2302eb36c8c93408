"""An optimizer whose steps are made on parameter servers."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Callable, Iterator

import torch

from collective_core.errors import InvalidUseError
from collective_core.extensions.ps.arrays import Array
from collective_core.extensions.ps.client import client
from collective_core.extensions.ps.clocks import check_staleness
from collective_core.extensions.ps.embedding import _Embedding
from collective_core.extensions.ps.store import name_of, options_of
from collective_core.runtime import membership
from collective_core.torch.functions import broadcast_parameters


class _Block:
    """The parameters of a group that have one type, as one array. ``names``: of the parameters, for errors."""

    def __init__(self, parameters: list[torch.nn.Parameter], names: list[str], array: Array, group: dict[str, Any]) -> None:
        self.parameters, self.names, self.array, self.group = parameters, names, array, group

    def gradient(self) -> torch.Tensor:
        for name, p in zip(self.names, self.parameters):
            if p.grad is not None and p.grad.layout is not torch.strided:
                raise ValueError(f"the gradient of {name} is sparse: use hvd.ps.Embedding or EmbeddingBag, or sparse=False")
        return _flat([p.grad if p.grad is not None else torch.zeros_like(p) for p in self.parameters])

    def take(self, values: torch.Tensor) -> None:
        with torch.no_grad():
            for p, part in zip(self.parameters, values.split([p.numel() for p in self.parameters])):
                p.copy_(part.view(p.shape))


def _flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().to("cpu").reshape(-1) for tensor in tensors])


def _describe(names: list[str], parameters: list[torch.nn.Parameter]) -> str:
    """What workers compare: where it differs, values would reach other parameters."""
    described = [[name, *p.shape] for name, p in zip(names, parameters)]
    known_by = hashlib.sha256(json.dumps(described).encode()).hexdigest()[:12]
    return f"{names[0]} to {names[-1]} ({len(names)}; names and shapes have the hash {known_by})"


class DistributedOptimizer(torch.optim.Optimizer):
    """Pushes gradients to the parameter servers, which make the steps of ``optimizer``, and pulls the parameters.

    Parameters begin as those of rank 0, or as the servers' where they have been restored; those of the model that it does not train are
    rank 0's. It trains those that require gradients when it is made. ``step()`` sends all gradients, those of the model's
    ``hvd.ps.Embedding`` too, and returns when this worker's parameters are as new as ``staleness`` demands. Parameters without a gradient
    count as having one of zeros. Parameters may be on a GPU: they travel through host memory. Schedulers of learning rates may be given
    this optimizer or the one it wraps. Buffers of the model (batch normalisation's) stay each worker's own. ``state_dict()`` has the
    options of groups; the optimizer's state is on the servers, and in their snapshots.

    Args:
        optimizer: of torch.optim, one that treats every element alone: SGD, Adam, AdamW, Adagrad, RMSprop, …
        model: whose embeddings on servers are trained, too: a model with such has one optimizer.
        staleness: 0: synchronous, each step with the mean of the workers' gradients, as ``hvd.DistributedOptimizer``. k: every worker's
            gradient is a step of its own, and no worker is more than k steps ahead of the slowest. None: as far as it likes.

    Raises ValueError for other optimizers, a negative ``staleness`` and a model whose embeddings have an optimizer already, and
    :class:`CollectiveError` (kind ``mismatch``) where the workers' models differ.
    """

    param_groups: list[dict[str, Any]]

    def __init__(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module, staleness: int | None = 0) -> None:
        check_staleness(staleness)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer is one of torch.optim, not a {type(optimizer).__name__}")
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model is a torch.nn.Module, not a {type(model).__name__}")
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._kind, self._client = type(optimizer), client()
        name = membership.next_name("ps.optimizer").replace(".noname", "")
        embeddings = {path: module for path, module in model.named_modules() if isinstance(module, _Embedding)}
        for path, embedding in embeddings.items():
            if embedding.is_connected:
                text = f"the embedding {path or embedding.name} has a hvd.ps.DistributedOptimizer already, which pushes its gradients"
                raise InvalidUseError(f"{text}: make one for all parameters of the model, in groups where their options differ", "invalid")
        names = {p: its_name for its_name, p in model.named_parameters()}
        for number, group in enumerate(self.param_groups):
            for place, p in enumerate(group["params"]):
                names.setdefault(p, f"parameter {place} of group {number}")
        self._blocks = [_Block(*each) for each in self._arrays(name, names, staleness)]
        trained = {p for block in self._blocks for p in block.parameters}
        #: Those that step() does not train, by name.
        self._frozen = {names[p]: p for group in self.param_groups for p in group["params"] if p not in trained and p.numel()}
        self._embeddings = list(embeddings.values())
        for path, embedding in embeddings.items():
            embedding.connect(f"{name}.module.{path}", staleness)
        others = [(its_name, p) for p, its_name in names.items() if p not in trained and p.numel()]
        broadcast_parameters(others, 0, self._client.group.process_set)
        self.pull()

    def _arrays(
        self, name: str, names: dict[torch.nn.Parameter, str], staleness: int | None
    ) -> Iterator[tuple[list[torch.nn.Parameter], list[str], Array, dict[str, Any]]]:
        for number, group in enumerate(self.param_groups):
            by_type: dict[str, list[torch.nn.Parameter]] = {}
            for p in group["params"]:
                if p.requires_grad and p.numel():
                    by_type.setdefault(name_of(p.dtype, "the model"), []).append(p)
            for dtype, parameters in by_type.items():
                options = options_of(self._kind, group)
                array_name, of_block = f"{name}.group.{number}.{dtype}", [names[p] for p in parameters]
                described = _describe(of_block, parameters)
                array = Array(array_name, _flat(list(parameters)), self._kind, staleness=staleness, parameters=described, **options)
                yield parameters, of_block, array, group

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Raises what the engine does for a rank that is lost, and ValueError for a gradient that it cannot send: a sparse one, or of a
        parameter that did not require gradients when the optimizer was made. ``closure`` is called once before.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for name, p in self._frozen.items():
            if p.grad is not None:
                text = f"{name} has a gradient, but did not require gradients when hvd.ps.DistributedOptimizer was made"
                raise InvalidUseError(f"{text}, which therefore does not train it: make the optimizer afterwards", "invalid")
        lr = {"lr": self.param_groups[0]["lr"]} if "lr" in self.param_groups[0] else {}
        pushes = [block.array.to_push(block.gradient(), options_of(self._kind, block.group)) for block in self._blocks]
        for embedding in self._embeddings:
            pushes.append(embedding.table.to_push(*embedding.take_gradients(), lr))
        self._take(self._client.exchange(pushes, [block.array.to_pull() for block in self._blocks]))
        return loss

    def pull(self) -> None:
        """Takes the servers' parameters as they are now. Waits as ``staleness`` says."""
        self._take(self._client.exchange([], [block.array.to_pull() for block in self._blocks]))

    def _take(self, answers: list[Any]) -> None:
        for block, parts in zip(self._blocks, answers):
            block.take(block.array.pulled(parts))

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for embedding in self._embeddings:
            embedding.drop_gradients()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises :class:`InvalidUseError`: what the servers hold is settled when the optimizer is made."""
        if "_blocks" in vars(self):
            raise InvalidUseError("give torch's optimizer all its groups before hvd.ps.DistributedOptimizer is made of it", "invalid")
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the options of groups. Raises :class:`InvalidUseError` where there is state besides (of momentum, …)."""
        if state_dict["state"]:
            text = 'the optimizer\'s state is on parameter servers, which take it from snapshots (hvd.ps.serve("folder"))'
            raise InvalidUseError(f"{text}: load_state_dict() takes the options of groups alone", "invalid")
        groups = self.param_groups
        super().load_state_dict(state_dict)
        for group, loaded in zip(groups, self.param_groups):
            group.update(loaded)
        self.param_groups = groups  # schedulers and the optimizer that was given hold these
