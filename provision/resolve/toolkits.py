"""Which of a host's CUDA toolkits something is built with, and why that one."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from provision.base.text import joined
from provision.base.versions import key
from provision.plan.model import Builder
from provision.resolve.machine import USUAL_TOOLKIT, Machine, Toolkit

UNKNOWN = "the facts do not say whether it is there"
LOOKED_AT = "CUDA_HOME, CUDA_PATH, the PATH, /usr/local/cuda*, /opt/cuda and the distribution's nvidia-cuda-toolkit"


def compilers(kind: Machine) -> list[tuple[str, Toolkit]]:
    """(CUDA, toolkit) of those with a compiler, in the order in which they were found."""
    return [(each.version, each) for each in kind.toolkits or () if each.compiler and each.version]


def for_compiling(kind: Machine, fits: Callable[[str], bool]) -> tuple[str, Toolkit, str] | None:
    """(CUDA, toolkit, why) to compile with for the host's own GPUs: the CUDA that an earlier run took, else the largest that fits, of the
    toolkit that was found first; None where no compiler fits.

    Args:
        fits: whether the host's driver and GPUs run what is compiled for a CUDA.
    """
    fitting = [(cuda, toolkit) for cuda, toolkit in compilers(kind) if fits(cuda)]
    if not fitting:
        return None
    kept = {cuda for package, cuda in kind.builds if ".tar." in package}
    cuda, chosen = max(fitting, key=lambda each: (each[0] in kept, key(each[0])))
    why = [f"{chosen.found}, of CUDA {cuda}"]
    for other, toolkit in compilers(kind):
        if toolkit != chosen:
            worse = "found after it" if other == cuda else "an earlier run took the other" if cuda in kept else "smaller"
            why.append(f"not {toolkit.path} of {other}: {worse if fits(other) else 'its driver or GPUs do not fit'}")
    return cuda, chosen, "; ".join(why)


def for_headers(kind: Machine, cuda: str) -> tuple[Toolkit, str] | None:
    """(toolkit, why) whose ``cuda.h`` fits best: the newest that is no newer than ``cuda``, else the oldest, then one that does not say.

    None where there is none. Where the facts do not say what is there, it is the usual one.
    """
    if kind.toolkits is None:
        return Toolkit(USUAL_TOOLKIT, None), UNKNOWN
    found = [each for each in kind.toolkits if each.headers]
    if not found:
        return None

    def cost(toolkit: Toolkit) -> tuple[bool, bool, tuple[int, ...]]:
        version = key(toolkit.version or "0")
        newer = version > key(cuda)
        return toolkit.version is None, newer, version if newer else tuple(-part for part in version)

    chosen = min(found, key=cost)
    why = [f"{chosen.found}, of CUDA {chosen.version or 'that it does not say'}"]
    why += [f"not {each.path} of {each.version or 'no known CUDA'}: it fits {cuda} no better" for each in found if each != chosen]
    return chosen, "; ".join(why)


def said(builders: Iterable[Builder]) -> list[str]:
    """A sentence for each toolkit: ``the CUDA toolkit at /opt/cuda (on a and b: its nvcc is on the PATH, of CUDA 12.4)``."""
    hosts: dict[tuple[str, str], list[str]] = {}
    for each in builders:
        if each.toolkit:
            hosts.setdefault((each.toolkit, each.why), []).append(each.host)
    return [f"with the CUDA toolkit at {toolkit} (on {joined(names)}: {why})" for (toolkit, why), names in hosts.items()]
