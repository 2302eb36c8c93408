"""Base images, as the user names them: what is a name, which of them debootstrap can make, which host gets which. Decides, does nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence

from provision.base.errors import UsageError

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
_COMPONENT = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_REFERENCE = re.compile(
    rf"(?:[a-zA-Z0-9.-]+(?::[0-9]+)?/)?{_COMPONENT}(?:/{_COMPONENT})*(?::[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}})?(?:@sha256:[0-9a-f]{{64}})?"
)


def checked(base: str) -> str:
    """The base with its tag spelt out (``:latest`` where there is none).

    Raises:
        UsageError: not the name of an image.
    """
    if not _REFERENCE.fullmatch(base):
        slip = re.fullmatch(r"debian[-_ ]?(\d+)", base.strip().lower())
        hint = f"Did you mean debian:{slip.group(1)}?" if slip else "Name an image such as debian:12, debian:13 or ubuntu:24.04."
        raise UsageError(f"'{base}' is not the name of an image.", hint=hint)
    if slip := re.fullmatch(r"debian(1[0-9])", base):
        raise UsageError(f"'{base}' is not the name of a base.", hint=f"Did you mean debian:{slip.group(1)}?")
    tagged = "@" in base or ":" in base.rsplit("/", 1)[-1]
    return base if tagged else f"{base}:latest"


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
    named = [checked(one) for one in asked]
    return [named[i % len(named)] for i in range(count)]


def suite_of(base: str) -> str | None:
    """The Debian suite behind a base; None when debootstrap cannot stand in for it."""
    match = _DEBIAN.fullmatch(base)
    return DEBIAN_SUITES.get(match.group(1)) if match else None
