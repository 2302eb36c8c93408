"""Names of images, as users write them. Pure."""

from __future__ import annotations

import re

from provision.base.errors import UsageError

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
