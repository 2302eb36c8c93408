"""CUDA tensors of a group: where each of its ranks has a GPU of its own they go through PyTorch's NCCL, beside the engine.

So ``init_process_group("collective")`` and ``("cpu:collective,cuda:nccl")`` are the same. Otherwise they go through host memory.
"""

from __future__ import annotations

import functools
import os
import warnings
from datetime import timedelta
from typing import Any, Callable, Sequence, TypeVar, cast

import torch
import torch.distributed as dist

Method = TypeVar("Method", bound=Callable[..., Any])


def situation(setting: str) -> dict[str, Any]:
    """What members of a group tell each other about the GPUs that they see. ``setting``: COLLECTIVE_NCCL."""
    return {"setting": setting, "gpus": sorted(platform.gpus())}


def unsupported_reason(everyone: Sequence[dict[str, Any]], hosts: Sequence[tuple[str, str]]) -> str:
    """Why ranks on these hosts (id, name) that have told this of themselves do not use NCCL; empty if they do. Pure."""
    for rank, each in enumerate(everyone):
        if each["setting"] == "off":
            return "COLLECTIVE_NCCL=off"
        if not each["gpus"]:
            return f"rank {rank} of the group has no GPU, or its PyTorch no NCCL"
    for host in dict.fromkeys(hosts):
        there = [each for each, place in zip(everyone, hosts) if place == host]
        for gpus in [each["gpus"] for each in there]:
            # Which of them each rank takes shows with its first tensor. NCCL itself refuses two ranks on one.
            sharing = [each for each in there if each["gpus"] == gpus]
            if len(sharing) > len(gpus) and sharing[0]["setting"] != "on":
                return f"{len(sharing)} ranks of host {host[1]} share {len(gpus)} of its GPUs"
    return ""


class Cuda:
    """Functions of CUDA and NCCL that this backend needs. A test puts another one in its place, ``cuda.platform``."""

    device = "cuda"

    def gpus(self) -> list[str]:
        """Names, which no others of the host have, of the GPUs that this process sees; none if its PyTorch has no NCCL."""
        if not dist.is_nccl_available() or not torch.cuda.is_available():
            return []
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")  # for PyTorch before 2.4, which does not tell more
        properties = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
        return [str(getattr(each, "uuid", f"{visible} {number}")) for number, each in enumerate(properties)]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is a GPU's."""
        return bool(tensor.is_cuda)

    def finish(self, device: torch.device | None) -> None:
        """Waits for what the program has enqueued on its current stream of a GPU (``device``: if this is one, else the current one)."""
        if torch.cuda.is_initialized():
            torch.cuda.current_stream(device if device is not None and device.type == "cuda" else None).synchronize()

    def backend(self, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)


platform = Cuda()


def make_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A process group of PyTorch's for tensors on GPUs. Not collective: NCCL connects at the first use."""
    inside = dist.PrefixStore("nccl", store)
    group = dist.ProcessGroup(inside, rank, size)
    backend = platform.backend(inside, rank, size, timeout)
    group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
    backend._set_sequence_number_for_group()
    group._register_backend(torch.device(platform.device), dist.ProcessGroup.BackendType.NCCL, backend)
    return group


def end_group(group: Any, abort: bool) -> None:
    """``abort``: with what it has under way. Otherwise it waits for that."""
    backend = group._get_backend(torch.device(platform.device))
    calls = ("abort", "_abort", "shutdown", "_shutdown") if abort else ("shutdown", "_shutdown")
    next((getattr(backend, name) for name in calls if hasattr(backend, name)), lambda: None)()


def on_its_device(method: Method) -> Method:
    """A collective of a group which ``group.of_gpus``, if there is one, does with tensors of a GPU.

    Where there is none, ``group.why_no_nccl`` says why, once.
    """

    @functools.wraps(method)
    def chosen(self: Any, *arguments: Any, **more: Any) -> Any:
        if (self.of_gpus is not None or self.why_no_nccl) and _is_on_gpu((*arguments, *more.values())):
            if self.of_gpus is not None:
                return getattr(self.of_gpus, method.__name__)(*arguments, **more)
            warnings.warn(f"CUDA tensors go through host memory, which is slower than NCCL: {self.why_no_nccl}", stacklevel=2)
            self.why_no_nccl = ""
        return method(self, *arguments, **more)

    return cast(Method, chosen)


def _is_on_gpu(arguments: Any) -> bool:
    """Of the first tensor that is found: PyTorch refuses those of different devices in one call."""
    for each in arguments:
        if torch.is_tensor(each):
            return platform.holds(each)
        if isinstance(each, (list, tuple)) and each:
            return _is_on_gpu(each)
    return False
