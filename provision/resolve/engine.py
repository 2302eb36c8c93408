"""The engine: of the sources in this toolkit, the same on every host; as a wheel of them where one fits, else compiled on a host."""

from __future__ import annotations

import re
from collections.abc import Iterable

from provision.base.versions import key
from provision.plan.model import CPU_ONLY, HOROVOD_NAMES, NCCL_STRICT, Engine
from provision.plan.requirements import Requirements
from provision.resolve.host_classes import HostClass

_PLATFORM = re.compile(r"manylinux_(\d+_\d+)_(.+)")


def engine(host_class: HostClass, requirements: Requirements) -> Engine:
    """The engine with the options from which later runs know what was requested."""
    options = {HOROVOD_NAMES: requirements.horovod_names, CPU_ONLY: requirements.cpu, NCCL_STRICT: requirements.nccl_strict}
    sources, file = host_class.kept_engine
    why = "as installed"  # other wheels on another controller change nothing there
    if sources is None or sources != requirements.engine_sha256:
        file, why = fitting_wheel(requirements.engine_wheels, host_class.arch, host_class.libc)
    return Engine(
        requirements.engine_version,
        "collective-core",
        "bundled",
        (why,),
        sha256=requirements.engine_sha256,
        options=tuple(option for option, requested in options.items() if requested),
        file=file,
    )


def fitting_wheel(names: Iterable[str], arch: str, glibc: str | None) -> tuple[str | None, str]:
    """(the first of these wheels that runs with this architecture and glibc, why; None, why the engine is compiled)."""
    why = f"no wheel for {arch}" if names else "no wheel of these sources (make dist)"
    for name in names:
        tags = map(_PLATFORM.fullmatch, name.removesuffix(".whl").rpartition("-")[2].split("."))
        if oldest := min((tag[1].replace("_", ".") for tag in tags if tag and tag[2] == arch), key=key, default=None):
            if glibc and key(oldest) <= key(glibc):
                return name, f"wheel for {arch} and glibc {oldest} or newer"
            why = f"its glibc is {glibc or 'unknown'}, and the wheel needs {oldest}"
    return None, f"compiled on a host: {why}"
