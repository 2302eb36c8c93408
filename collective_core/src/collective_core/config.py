"""The engine's environment variables, read once at ``init()``.

=============================  =======================================================================================
COLLECTIVE_TIMEOUT             seconds without progress after which a collective fails (300)
COLLECTIVE_START_TIMEOUT       seconds for connecting all ranks (60)
COLLECTIVE_ADDRESS             numeric address of this host that the other hosts shall use
COLLECTIVE_NETWORK             networks as CIDR, comma separated; each host uses its address in the first that fits
COLLECTIVE_FUSION_MB           size in MB of the buckets in which DistributedOptimizer sums gradients (25)
COLLECTIVE_HOST_ID             for tests: ranks with different values behave as if on different hosts
COLLECTIVE_SIMD                for tests: default, avx2 or avx512, at most which instructions may be used
=============================  =======================================================================================
"""

from __future__ import annotations

import os
from typing import NamedTuple

from collective_core.errors import CollectiveError

#: Long enough for a rank that compiles, loads data or evaluates alone; short enough to be noticed the same day.
DEFAULT_TIMEOUT = 300.0
#: Imports on a cold network file system take tens of seconds, but they are over when ranks connect.
DEFAULT_START_TIMEOUT = 60.0
#: PyTorch's own bucket size: large enough for full bandwidth, small enough to overlap with the backward pass.
DEFAULT_FUSION_MB = 25.0


class Config(NamedTuple):
    timeout: float
    start_timeout: float
    fusion_bytes: int
    address: str | None
    networks: tuple[str, ...]
    host_id: str | None


def _number(name: str, default: float) -> float:
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise CollectiveError(f"{name}={text!r} is not a positive number", "invalid")
    return value


def from_environment() -> Config:
    """Raises :class:`CollectiveError` (kind ``invalid``) naming the variable that cannot be read."""
    networks = os.environ.get("COLLECTIVE_NETWORK", "")
    return Config(
        timeout=_number("COLLECTIVE_TIMEOUT", DEFAULT_TIMEOUT),
        start_timeout=_number("COLLECTIVE_START_TIMEOUT", DEFAULT_START_TIMEOUT),
        fusion_bytes=int(_number("COLLECTIVE_FUSION_MB", DEFAULT_FUSION_MB) * (1 << 20)),
        address=os.environ.get("COLLECTIVE_ADDRESS", "").strip() or None,
        networks=tuple(part.strip() for part in networks.split(",") if part.strip()),
        host_id=os.environ.get("COLLECTIVE_HOST_ID", "").strip() or None,
    )
