"""Names of processor architectures: the toolkit uses the kernel's (``x86_64``); Debian and container engines use others (``amd64``)."""

from __future__ import annotations

from provision import catalog


def kernel_name(name: str) -> str:
    """``amd64`` → ``x86_64``; an unknown name is returned unchanged."""
    return next((real for real, others in catalog.os().architectures.items() if name in others), name)


def debian_name(name: str) -> str:
    """``x86_64`` → ``amd64``; an unknown name is returned unchanged."""
    others = catalog.os().architectures.get(name)
    return others[0] if others else name
