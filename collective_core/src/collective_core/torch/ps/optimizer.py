"""An optimizer whose steps are made on parameter servers."""

from __future__ import annotations

from typing import Any, Callable, Iterator

import torch

from collective_core.common.parameter_server.client import client
from collective_core.common.parameter_server.clocks import check_staleness
from collective_core.runtime import membership
from collective_core.torch.ps.arrays import Array
from collective_core.torch.ps.embedding import _Embedding
from collective_core.torch.ps.store import name_of, options_of


class _Block:
    """The parameters of a group that have one type, as one array."""

    def __init__(self, parameters: list[torch.nn.Parameter], array: Array, group: dict[str, Any]) -> None:
        self.parameters, self.array, self.group = parameters, array, group

    def gradient(self) -> torch.Tensor:
        return _flat([p.grad if p.grad is not None else torch.zeros_like(p) for p in self.parameters])

    def take(self, values: torch.Tensor) -> None:
        with torch.no_grad():
            for p, part in zip(self.parameters, values.split([p.numel() for p in self.parameters])):
                p.copy_(part.view(p.shape))


def _flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().to("cpu").reshape(-1) for tensor in tensors])


class DistributedOptimizer(torch.optim.Optimizer):
    """Pushes gradients to the parameter servers, which make the steps of ``optimizer``, and pulls the parameters.

    Parameters begin as those of rank 0, or as the servers' where they have been restored. ``step()`` sends all gradients, those of the
    model's ``hvd.ps.Embedding`` too, and returns when this worker's parameters are as new as ``staleness`` demands. Parameters without a
    gradient count as having one of zeros. Parameters may be on a GPU: they travel through host memory. Schedulers of learning rates may be
    given this optimizer or the one it wraps. Buffers of the model (batch normalisation's) stay each worker's own.

    Args:
        optimizer: of torch.optim, one that treats every element alone: SGD, Adam, AdamW, Adagrad, RMSprop, …
        model: whose embeddings on servers are trained, too.
        staleness: 0: synchronous, each step with the mean of the workers' gradients, as ``hvd.DistributedOptimizer``. k: every worker's
            gradient is a step of its own, and no worker is more than k steps ahead of the slowest. None: as far as it likes.

    Raises ValueError for other optimizers and a negative ``staleness``, and :class:`CollectiveError` (kind ``mismatch``) where the workers'
    models differ.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module, staleness: int | None = 0) -> None:
        check_staleness(staleness)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer is one of torch.optim, not a {type(optimizer).__name__}")
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model is a torch.nn.Module, not a {type(model).__name__}")
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._kind, self._client = type(optimizer), client()
        name = membership.next_name("ps.optimizer").replace(".noname", "")
        self._blocks = [_Block(*each) for each in self._arrays(name, staleness)]
        self._embeddings = [module for module in model.modules() if isinstance(module, _Embedding)]
        for embedding in self._embeddings:
            embedding.connect(staleness)
        self.pull()

    def _arrays(self, name: str, staleness: int | None) -> Iterator[tuple[list[torch.nn.Parameter], Array, dict[str, Any]]]:
        for number, group in enumerate(self.param_groups):
            by_type: dict[str, list[torch.nn.Parameter]] = {}
            for p in group["params"]:
                if p.requires_grad and p.numel():
                    by_type.setdefault(name_of(p.dtype, "the model"), []).append(p)
            for dtype, parameters in by_type.items():
                options = options_of(self._kind, group)
                array = Array(f"{name}.group.{number}.{dtype}", _flat(list(parameters)), self._kind, staleness=staleness, **options)
                yield parameters, array, group

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Raises what the engine does for a rank that is lost; ``closure`` is called once before."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
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
