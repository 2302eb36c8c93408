"""The engine: built from the sources in this toolkit, the same on every host."""

from __future__ import annotations

from provision.plan.model import CPU_ONLY, HOROVOD_NAMES, NCCL_STRICT, Engine
from provision.plan.requirements import Requirements


def engine(requirements: Requirements) -> Engine:
    """The engine with the options from which later runs know what was requested."""
    options = {HOROVOD_NAMES: requirements.horovod_names, CPU_ONLY: requirements.cpu, NCCL_STRICT: requirements.nccl_strict}
    return Engine(
        requirements.engine_version,
        "collective-core",
        "bundled",
        ("built from the sources in this toolkit",),
        sha256=requirements.engine_sha256,
        options=tuple(option for option, requested in options.items() if requested),
    )
