"""Bringing all ranks to one state: parameters, optimizer state, any object."""

from __future__ import annotations

from typing import Any, Callable, Iterable

import torch

from collective_core.common import objects
from collective_core.runtime import membership
from collective_core.runtime.process_sets import ProcessSet
from collective_core.torch.compiling import not_compiled
from collective_core.torch.compression import STATE_KEY
from collective_core.torch.handles import synchronize
from collective_core.torch.ops.broadcast import broadcast_async_
from collective_core.torch.sharded import is_shard


def broadcast_parameters(params: dict[str, Any] | Iterable[tuple[str, Any]], root_rank: int, process_set: ProcessSet | None = None) -> None:
    """Overwrites parameters with the root's: ``model.state_dict()``, ``model.named_parameters()`` or a list of tensors. Non-tensors
    in a dictionary are skipped, and so are shards, which are every rank's own.

    Raises ValueError for anything else, :class:`CollectiveError` when names or shapes differ between ranks.
    """
    if isinstance(params, dict):
        pairs = sorted(params.items())
    else:
        listed = list(params)
        if any(not torch.is_tensor(p) and not isinstance(p, tuple) for p in listed):
            raise ValueError(f"invalid params of type: {type(params)}; pass model.state_dict() or model.named_parameters()")
        pairs = [p if isinstance(p, tuple) else (str(number), p) for number, p in enumerate(listed)]
    tensors = [(f"broadcast.parameter.{name}", value) for name, value in pairs if torch.is_tensor(value) and not is_shard(value)]
    handles = [broadcast_async_(tensor, root_rank, name, process_set) for name, tensor in tensors]
    for handle in handles:
        synchronize(handle)


class _TensorPlace:
    """Stands for a tensor in a pickled optimizer state; the values follow separately, without pickling."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self.stride = torch.empty_like(tensor, device="meta").stride()  # fused steps rely on the order in memory
        self.dtype = tensor.dtype
        self.device_type = tensor.device.type


def _take_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """A copy of a nested state with places instead of tensors, which are appended to ``tensors`` in order. Sparse ones stay in it."""
    if torch.is_tensor(value) and value.layout is not torch.strided:
        return value.detach().cpu()
    if torch.is_tensor(value):
        tensors.append(value)
        return _TensorPlace(value)
    if isinstance(value, dict):
        return {key: _take_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_take_tensors(item, tensors) for item in value])
    return value


def _put_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The reverse: fills the places with new tensors, which are appended to ``tensors`` in the same order."""
    if isinstance(value, _TensorPlace):
        tensors.append(torch.empty_strided(value.shape, value.stride, dtype=value.dtype))
        return tensors[-1]
    if isinstance(value, dict):
        return {key: _put_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_put_tensors(item, tensors) for item in value])
    return value


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,  # noqa: ARG001 - Horovod's parameter; the state travels without it
    process_set: ProcessSet | None = None,
) -> None:
    """Overwrites the optimizer's state and options with the root's. Other ranks need not have any state yet.

    Where there is none, parameters get gradients of zeros, as with Horovod, whose programs broadcast them next.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    if not optimizer.state:
        _make_gradients(optimizer)
    is_root = membership.rank() == root_rank
    tensors: list[torch.Tensor] = []
    skeleton = _take_tensors(_shared(optimizer.state_dict()), tensors) if is_root else None
    skeleton = broadcast_object(skeleton, root_rank, "broadcast.optimizer.skeleton", process_set)
    if is_root:
        # Contiguous copies, because a state tensor may be a view with gaps that cannot be overwritten in place.
        tensors = [tensor.detach().cpu().contiguous() for tensor in tensors]
    else:
        state = _put_tensors(skeleton, tensors)
    handles = [broadcast_async_(t, root_rank, f"broadcast.optimizer.{i}", process_set) for i, t in enumerate(tensors)]
    for handle in handles:
        synchronize(handle)
    if not is_root:
        load_in_place(optimizer, state)


def _shared(state: dict[str, Any]) -> dict[str, Any]:
    """Without what of a lossy compression is one rank's alone: the gradients that it has not sent yet."""
    if STATE_KEY not in state:
        return state
    return {**state, STATE_KEY: {"factors": state[STATE_KEY]["factors"]}}


def _make_gradients(optimizer: torch.optim.Optimizer) -> None:
    wants_sparse = isinstance(optimizer, torch.optim.SparseAdam)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in [p for p in parameters if p.requires_grad and p.grad is None and not is_shard(p)]:
        zeros = torch.zeros_like(parameter)
        parameter.grad = zeros.to_sparse(1) if wants_sparse else zeros


def load_in_place(optimizer: torch.optim.Optimizer, state: Any, same_model: bool = True) -> None:
    """``load_state_dict``, which moves tensors to their parameters' devices, but into the groups and the state that are there.

    A learning-rate scheduler that was made earlier, and an optimizer that was wrapped later, hold the same objects. Tensors keep their
    types, so that who loads a state goes on exactly like who had it; those of a parameter's shape only for the ``same_model``: one of
    another type takes them along.
    """
    groups, states = optimizer.param_groups, optimizer.state
    optimizer.load_state_dict(state)
    if len(groups) == len(optimizer.param_groups):
        for old, new in zip(groups, optimizer.param_groups):
            loaded = dict(new)
            old.clear()
            old.update(loaded)
        optimizer.param_groups = groups
    loaded_states = dict(optimizer.state)
    states.clear()
    states.update(loaded_states)
    optimizer.state = states
    _give_back_types(optimizer, state, same_model)


def _give_back_types(optimizer: torch.optim.Optimizer, state: Any, same_model: bool) -> None:
    """``load_state_dict`` gives every tensor its parameter's type, also one that the optimizer keeps in another, as NAdam does."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters):
        loaded, saved = optimizer.state.get(parameter), state["state"].get(number)
        if not isinstance(loaded, dict) or not isinstance(saved, dict):
            continue
        for name, value in saved.items():
            if not torch.is_tensor(value) or not torch.is_tensor(loaded.get(name)):
                continue
            if loaded[name].dtype != value.dtype and (same_model or value.shape != parameter.shape):
                loaded[name] = value.to(loaded[name].device)


broadcast_object = not_compiled(objects.broadcast_object)
allgather_object = not_compiled(objects.allgather_object)


def broadcast_object_fn(root_rank: int = 0, name: str | None = None, process_set: ProcessSet | None = None) -> Callable[[Any], Any]:
    """A function of an object that calls :func:`broadcast_object` with these arguments."""
    return lambda obj: broadcast_object(obj, root_rank, name, process_set)
