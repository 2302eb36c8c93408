"""What programs and tests ask before ``init``."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from contextlib import contextmanager
from typing import Any, Callable, Iterator, Sequence, TypeVar

from collective_core.common import build_info

_cache = functools.lru_cache(maxsize=None)
_Item = TypeVar("_Item")

#: The frameworks that Horovod has extensions for and there are names of here.
EXTENSIONS = ["tensorflow", "torch"]


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:  # noqa: ARG001 - Horovod's parameter
    """Whether there is a ``horovod.NAME``, and the framework is installed."""
    return ext_base_name in EXTENSIONS and importlib.util.find_spec(ext_base_name) is not None


def check_extension(ext_name: str, *_: Any) -> None:
    """Raises ImportError where there is no ``horovod.NAME``."""
    if ext_name.rpartition(".")[2] not in EXTENSIONS:
        raise ImportError(f"{ext_name} is not part of collective_core")


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:  # noqa: ARG001 - Horovod's parameters
    """Whether PyTorch sees a GPU."""
    import torch

    return bool(torch.cuda.is_available())


def nccl_built(verbose: bool = False) -> int:  # noqa: ARG001
    """As ``hvd.nccl_built`` of PyTorch."""
    import collective_core.torch as hvd

    return hvd.nccl_built()


def _with_verbose(built: Callable[[], bool]) -> Callable[..., bool]:
    """As ``hvd.mpi_built`` and so on, with Horovod's parameter."""
    return lambda verbose=False: built()  # noqa: ARG005


mpi_built, gloo_built = _with_verbose(build_info.mpi_built), _with_verbose(build_info.gloo_built)
ddl_built, ccl_built = _with_verbose(build_info.ddl_built), _with_verbose(build_info.ccl_built)


@contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Has environment variables set meanwhile; None leaves one as it is."""
    given = {name: value for name, value in variables.items() if value is not None}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether Horovod has an Adasum of so many ranks; the engine has one of any number."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(items: Sequence[_Item], parts: int) -> list[Sequence[_Item]]:
    """So many parts of the list, as even as can be; the first have one more."""
    least, more = divmod(len(items), parts)
    ends = [number * least + min(number, more) for number in range(parts + 1)]
    return [items[begin:end] for begin, end in zip(ends, ends[1:])]


def is_iterable(x: Any) -> bool:
    """Whether one can go through it."""
    try:
        iter(x)
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether version ``ver`` is ``target`` or newer. Raises ValueError for what is not a version."""
    if not isinstance(ver, str) or not isinstance(target, str):
        raise ValueError(f"invalid versions {ver!r} and {target!r}: expected strings")
    return _version(ver) >= _version(target)


def _version(text: str) -> tuple[list[int], bool]:
    """Its numbers without zeros at the end, and whether it is a release: ``2.9.0rc1`` is older than ``2.9``. Hosts may lack packaging."""
    found = re.fullmatch(r"v?(\d+(?:\.\d+)*)[-_.]?(a|b|c|rc|alpha|beta|pre|preview|dev)?\S*", text.strip())
    if found is None:
        raise ValueError(f"invalid version {text!r}: expected numbers, such as 2.9.1")
    return [int(part) for part in re.sub(r"(\.0+)+$", "", found[1]).split(".")], not found[2]
