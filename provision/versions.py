"""Version numbers as the field writes them: ``4.1.8``, ``2.9.0-1``, ``2.13.0+cpu``, ``3.11``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def key(version: str) -> tuple[int, ...]:
    """The numbers of the upstream version, for comparing: epoch, Debian revision and local part do not count."""
    upstream = version.split(":", 1)[-1].split("+", 1)[0].split("-", 1)[0]
    numbers = re.findall(r"\d+", upstream)
    if not numbers:
        raise ValueError(f"no number in version {version!r}")
    return tuple(int(number) for number in numbers)


def matches(version: str, entry: Mapping[str, Any]) -> bool:
    """Whether a catalogue entry (``versions: […]`` or ``below: …``) covers ``version``."""
    if "versions" in entry:
        return any(key(version)[: len(key(listed))] == key(listed) for listed in entry["versions"])
    return key(version) < key(str(entry["below"]))


def minor(version: str) -> str:
    """``3.11.2`` → ``3.11``."""
    return ".".join(str(number) for number in key(version)[:2])
