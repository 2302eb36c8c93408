"""Processor architectures: the kernel's name (``x86_64``) stands everywhere in the toolkit; others write ``amd64``. From os.yaml."""

from __future__ import annotations

from provision import catalog


def kernel_name(name: str) -> str:
    """``amd64`` → ``x86_64``, whoever wrote it; a name that is not known stays as it is."""
    return next((real for real, others in catalog.os().architectures.items() if name in others), name)


def debian_name(name: str) -> str:
    """``x86_64`` → ``amd64``, as Debian and container engines write it; a name that is not known stays as it is."""
    others = catalog.os().architectures.get(name)
    return others[0] if others else name
