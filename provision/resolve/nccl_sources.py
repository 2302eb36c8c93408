"""NCCL from its sources: who can build it, for which CUDA and GPUs. A host without a CUDA compiler gets what one like it has built."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from provision.base.versions import key
from provision.plan.model import Builder
from provision.resolve import toolkits
from provision.resolve.machine import Machine, Toolkit

# As many hosts are named: one builds, and the next steps in where it cannot.
_FEW = 8

Fits = Callable[[Machine, str], bool]


def alike(kind: Machine) -> tuple[str, str, bool]:
    """Hosts that agree in it can use each other's builds. What a login without root has built does not go where root would install it."""
    return kind.system, kind.arch, kind.root


def compilers(kinds: Iterable[Machine], fits: Fits) -> dict[Machine, tuple[str, ...]]:
    """For every kind of host the CUDAs for which NCCL can be built for it: that of its own compiler, else those of the hosts like it.

    Args:
        fits: whether a kind of host, its driver and GPUs, can use what is built for a CUDA.
    """
    kinds = list(kinds)
    own = {kind: able[0] for kind in kinds if (able := _own(kind, fits))}
    found = {}
    for kind in kinds:
        others = {cuda for other, cuda in own.items() if alike(other) == alike(kind) and fits(kind, cuda)}
        found[kind] = (own[kind],) if kind in own else tuple(sorted(others, key=key))
    return found


def builders(sharing: Mapping[Machine, list[str]], cuda: str, fits: Fits) -> tuple[Builder, ...]:
    """A few of the hosts that share a build for this CUDA: those that can make it."""
    found = []
    for kind, names in sharing.items():
        own = _own(kind, fits)
        if own and own[0] == cuda:
            found += [Builder(name, own[1].path, own[2]) for name in names]
    return tuple(sorted(found, key=lambda each: each.host)[:_FEW])


def _own(kind: Machine, fits: Fits) -> tuple[str, Toolkit, str] | None:
    """What it can compile with itself."""
    return toolkits.for_compiling(kind, lambda cuda: fits(kind, cuda)) if kind.make else None


def options(sharing: Iterable[Machine]) -> tuple[str, ...]:
    """Words for make: code for the GPUs of the hosts that share a build, and PTX of the newest for newer ones; all that there are, where
    they are not known."""
    sharing = list(sharing)
    if not all(kind.capabilities for kind in sharing):
        return ()
    numbers = [each.replace(".", "") for each in sorted({each for kind in sharing for each in kind.capabilities}, key=key)]
    code = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in numbers]
    return (" ".join([f"NVCC_GENCODE={code[0]}", *code[1:], f"-gencode=arch=compute_{numbers[-1]},code=compute_{numbers[-1]}"]),)
