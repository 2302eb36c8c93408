"""Base images, as the user names them: what is a name, which of them debootstrap can make, which host gets which. Decides, does nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence

from provision.base.errors import UsageError
from provision.containers import image_names

DEFAULT = "debian:12"

#: Debian's tag -> the suite that debootstrap makes, when the image cannot be pulled.
DEBIAN_SUITES = {
    "12": "bookworm",
    "12-slim": "bookworm",
    "bookworm": "bookworm",
    "bookworm-slim": "bookworm",
    "13": "trixie",
    "13-slim": "trixie",
    "trixie": "trixie",
    "trixie-slim": "trixie",
}

_DEBIAN = re.compile(r"(?:library/)?debian:([a-z0-9.-]+)")


def assign(count: int, base: str | Sequence[str] | None) -> list[str]:
    """The base of each host: host i gets the i-th base, beginning again where there are fewer bases than hosts.

    Args:
        count: number of hosts, at least 1.
        base: one image, several, or None for ``DEFAULT``.

    Raises:
        UsageError: no host asked for, more bases than hosts, or a base that is no image's name.
    """
    if count < 1:
        raise UsageError(f"A sandbox needs at least one host, not {count}.", hint="Say how many: provision sandbox up -n 2")
    asked = [base] if isinstance(base, str) else list(base or [DEFAULT])
    if len(asked) > count:
        raise UsageError(f"{len(asked)} bases for {count} host(s).", hint=f"Ask for as many hosts: provision sandbox up -n {len(asked)}")
    named = [image_names.checked(one) for one in asked]
    return [named[i % len(named)] for i in range(count)]


def suite_of(base: str) -> str | None:
    """The Debian suite behind a base; None when debootstrap cannot stand in for it."""
    match = _DEBIAN.fullmatch(base)
    return DEBIAN_SUITES.get(match.group(1)) if match else None
