"""Names of images, as users write them."""

from __future__ import annotations

import re

from provision.base.errors import UsageError

_COMPONENT = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_REFERENCE = re.compile(
    rf"(?:[a-zA-Z0-9.-]+(?::[0-9]+)?/)?{_COMPONENT}(?:/{_COMPONENT})*(?::[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}})?(?:@sha256:[0-9a-f]{{64}})?"
)


def checked(base: str) -> str:
    """The name with its tag (``:latest`` where there is none).

    Raises:
        UsageError: not the name of an image.
    """
    typo = re.fullmatch(r"debian[-_ ]?(\d+)", base.strip().lower())
    if typo or not _REFERENCE.fullmatch(base):
        hint = f"Did you mean debian:{typo[1]}?" if typo else "Name an image such as debian:12, debian:13 or ubuntu:24.04."
        raise UsageError(f"'{base}' is not the name of an image.", hint=hint)
    tagged = "@" in base or ":" in base.rsplit("/", 1)[-1]
    return base if tagged else f"{base}:latest"
