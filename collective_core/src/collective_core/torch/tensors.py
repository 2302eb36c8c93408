"""Helpers of every collective on torch tensors: types, devices, copies."""

from __future__ import annotations

import ctypes
from typing import Any, Callable, NamedTuple

import torch

from collective_core import _native
from collective_core.runtime import membership

#: The engine's names of the element types that it can send. Older versions of PyTorch have fewer.
_NAMES: dict[torch.dtype, str] = {getattr(torch, name): name for name in (*_native.DTYPES, *_native.PAIRS) if hasattr(torch, name)}


def _exchange_api() -> int:
    name, version = b"dlpack_exchange_api", 1
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if type(capsule).__name__ != "PyCapsule":
        return 0
    pointer_in = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
    address: int = pointer_in(capsule, name)
    return address if ctypes.c_uint32.from_address(address).value == version else 0


#: Address of the functions by which the engine can ask a tensor for its memory and form (DLPack's C exchange API); 0 in PyTorch's before
#: 2.10, which have none.
EXCHANGE_API = _exchange_api()


def _raiser_of_versions() -> Callable[[tuple[torch.Tensor, ...]], Any]:
    """PyTorch's own; its public function, ``torch.autograd.graph.increment_version``, costs three times as much as what it calls."""
    raise_versions: Any = getattr(torch._C, "_increment_version", None)
    try:
        raise_versions((torch.empty(0),))
    except TypeError:  # an older PyTorch, which has none, or one that takes a single tensor
        return lambda tensors: [tensor.detach().as_strided((0,), (1,)).zero_() for tensor in tensors if not tensor.is_inference()]
    return raise_versions  # type: ignore[no-any-return]


class Way(NamedTuple):
    """Way of the tensors that something else than the CPU ``holds`` (torch/gpu.py): as ``ways.start`` and ``ways.start_rows``."""

    holds: Callable[[torch.Tensor], bool]
    start_tensor: Callable[..., Any]
    start_rows: Callable[..., Any]


others: list[Way] = []

#: What a prepared call can be of (runtime/prepared.py): others may change what the engine cannot see.
PLAIN = (torch.Tensor, torch.nn.Parameter)

#: Tells autograd that the engine has changed tensors: what it has saved of them is out of date.
raise_versions = _raiser_of_versions()


def unsupported_tensor(tensor: torch.Tensor, layout: torch.layout = torch.strided) -> str:
    """Why the tensor cannot be sent; empty if it can."""
    if tensor.dtype in _NAMES and tensor.layout is layout:
        return ""
    return f"tensors of {tensor.dtype} with layout {tensor.layout} cannot be sent" + ("" if layout is torch.strided else " as sparse ones")


def describe(
    kind: int,
    tensor: torch.Tensor,
    name: str | None,
    process_set: int,
    problem: str = "",
    layout: torch.layout = torch.strided,
    **rest: Any,
) -> _native.Operation:
    """An operation on ``tensor``: its type, shape and device, and why this rank cannot run it, which is then an error on every rank.

    It has no addresses yet, and goes through the engine; ``problem``: of the caller's own; ``rest``: as of ``_native.operation``. Without
    a ``name`` it gets the next one of its kind.
    """
    unsupported_reason = unsupported_tensor(tensor, layout) or problem
    device = _native.HOST_MEMORY if is_on_host(tensor) else _native.GPU
    return _native.operation(
        kind,
        name or membership.next_name(_native.OPERATIONS[kind], process_set),
        dtype_name(tensor),
        rest.pop("shape", tuple(tensor.shape)),
        rest.pop("count", 0 if unsupported_reason else tensor.numel()),
        process_set=process_set,
        unsupported_reason=unsupported_reason,
        device=device,
        **rest,
    )


def dtype_name(tensor: torch.Tensor) -> str:
    """The engine's name of the tensor's element type, or a stand-in for one that it cannot send."""
    return _NAMES.get(tensor.dtype, _native.STAND_IN)


def is_on_host(tensor: torch.Tensor) -> bool:
    """Whether the CPU holds the tensor, and nothing else does."""
    return tensor.device.type == "cpu" and not any(other.holds(tensor) for other in others)


def is_in_host_memory(tensor: torch.Tensor) -> bool:
    """Whether the engine can read and write the tensor where it lies."""
    return is_on_host(tensor) and is_plain(tensor)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its memory holds its values: PyTorch has not put off to negate or to conjugate them."""
    return not tensor.is_neg() and not tensor.is_conj()


def adopt_again(tensor: torch.Tensor) -> bool:
    """Moves a tensor that is reduced in place for the second time into memory that the ranks of a host share, where the program allows
    that (COLLECTIVE_ADOPT_TENSORS). Returns whether it stays where it lies now."""
    if not membership.current().config.adopt_tensors:
        return True
    from collective_core.torch import memory  # loaded where it is wanted

    times = memory.times_reduced(tensor)
    if times == 2:
        memory.adopt(tensor)
    return times > 1


def new_like(tensor: torch.Tensor) -> torch.Tensor:
    """An uninitialised, contiguous tensor of the same shape, type and device; an unsupported one itself, as nothing is written then."""
    if unsupported_tensor(tensor):
        return tensor
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def without_data(tensor: torch.Tensor, name: str, process_set: int, problem: str = "", **rest: Any) -> _native.Operation:
    """An allreduce of no element, in which the ranks compare what each of them has: type, shape, device, reduction and factors.

    For a reduction that is made of other operations, which do not know all of that. The shape begins with a 0 there.
    """
    return describe(_native.ALLREDUCE, tensor, name, process_set, problem, shape=(0, *tensor.shape), count=0, **rest)


def names_of_group(name: str | None, count: int) -> list[str | None]:
    """The names of a group's members."""
    return [f"{name}.{i}" if name else None for i in range(count)]


def received_tensor(buffer: Any, rows: list[int], like: torch.Tensor) -> torch.Tensor:
    """The engine's bytes as a tensor of ``sum(rows)`` rows of the shape, type and device of ``like``."""
    shape = (sum(rows), *like.shape[1:])
    if not buffer.size:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    return torch.from_numpy(buffer).view(like.dtype).reshape(shape).to(like.device)
