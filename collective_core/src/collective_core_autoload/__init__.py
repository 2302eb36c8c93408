"""Function that PyTorch calls at its import (entry point ``torch.backends``): makes the backend ``collective`` known to torch.distributed.

Apart from the package, because every program that imports PyTorch would else import the engine. It is imported with the first group.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import multiprocessing
import os
from typing import Any, Iterator
from urllib.parse import parse_qs, urlsplit

NAME = "collective"
#: Where ranks are told who they are, in the words of torch.distributed; the launchers of MPI and Slurm have other ones.
WORDS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def register() -> None:
    """Raises nothing where torch.distributed is missing: PyTorch would not be imported then."""
    import torch.distributed as dist

    if os.environ.get("COLLECTIVE_AUTOCAST") == "bf16":
        import torch

        # Nothing would empty the cache of converted parameters, which would miss every step.
        torch.set_autocast_cache_enabled(False)
        torch.set_autocast_dtype("cpu", torch.bfloat16)
        torch.set_autocast_enabled("cpu", True)
    if not dist.is_available() or NAME in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(NAME, _make, extended_api=True, devices=["cpu", "cuda"])
    if os.environ.get("COLLECTIVE_FOR_GLOO") == "1":
        _take_place_of_gloo(dist)
    # The name is also that of a function of torch.distributed.
    handlers = getattr(importlib.import_module("torch.distributed.rendezvous"), "_rendezvous_handlers", {})
    usual = handlers.get("env")
    if usual is None:
        return

    def meet(url: str, *arguments: Any, **more: Any) -> Iterator[Any]:
        """``env://``, also for ranks of launchers that do not set the variables of torch.distributed."""
        unsupported_reason = _unsupported_reason(url)
        if unsupported_reason:
            raise ValueError(f"Error initializing torch.distributed using env:// rendezvous: {unsupported_reason}")
        if any(word in os.environ for word in WORDS) or "?" in url:
            return usual(url, *arguments, **more)  # type: ignore[no-any-return]
        from collective_core.torch.backend.store import meet_with_launcher

        return meet_with_launcher(*arguments, **more) or usual(url, *arguments, **more)

    handlers["env"] = meet


def _take_place_of_gloo(dist: Any) -> None:
    """Makes groups of this backend where the program asks for Gloo's, or for none on a machine without GPUs.

    PyTorch has no setting for that: the name is compared where the group is made. So its two functions get another name.
    """
    dist.Backend.default_device_backend_map["cpu"] = NAME

    def renamed(function: Any) -> Any:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*arguments: Any, **more: Any) -> Any:
            bound = signature.bind(*arguments, **more)
            if str(bound.arguments.get("backend")).lower() in ("gloo", "cpu:gloo"):
                bound.arguments["backend"] = NAME
            return function(*bound.args, **bound.kwargs)

        return call

    core = dist.distributed_c10d
    for name in ("init_process_group", "new_group"):
        ours = renamed(getattr(core, name))
        setattr(core, name, ours)
        setattr(dist, name, ours)


def _unsupported_reason(url: str) -> str:
    """What is wrong with a rank of ours that waits for more ranks than its launcher has started; it would wait for half an hour.

    Processes that a rank starts itself, one for each GPU of its host, say, are more than the launcher knows of.
    """
    ours = [os.environ.get(name) for name in ("COLLECTIVE_RANK", "COLLECTIVE_SIZE")]
    if None in ours or "TORCHELASTIC_RUN_ID" in os.environ or multiprocessing.parent_process() is not None:
        return ""
    asked = parse_qs(urlsplit(url).query)
    rank, size = (asked.get(name, [os.environ.get(name.upper())])[0] for name in ("rank", "world_size"))
    if rank != ours[0] or not size or not size.isdigit() or int(size) <= int(str(ours[1])):
        return ""
    return f"world_size is {size}, and the launcher has started {ours[1]} ranks"


def _make(options: Any, _: Any) -> Any:
    import torch

    from collective_core.torch.backend import CollectiveGroup

    if not torch.cuda.is_available():  # asked as late as this because it may take the driver's start
        torch.distributed.Backend.backend_capability[NAME] = ["cpu"]
    return CollectiveGroup(options.store, options.group_rank, options.group_size, options.timeout)
