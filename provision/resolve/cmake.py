"""CMake: the wheel, the same on every host."""

from __future__ import annotations

from provision import catalog
from provision.plan.model import Rejected, Wheel
from provision.resolve.machine import Machine


def cmake(kind: Machine) -> Wheel:
    """The wheel. It is the same for every architecture that Open MPI and PyTorch have wheels for."""
    known = catalog.cmake()
    wheel = known.wheel
    offered = kind.offered("cmake")
    lost = (Rejected(f"the distribution's cmake{' ' + offered[0] if offered else ''}", "it differs from distribution to distribution"),)
    why = (
        f"the same on every host; the engine needs {known.needed.engine} or newer, Horovod {known.needed.horovod}",
        "the last 3.x still builds old projects",
    )
    return Wheel(wheel.version, f"{wheel.package}=={wheel.version}", "wheel", why, lost)
