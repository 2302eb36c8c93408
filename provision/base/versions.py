"""Version numbers as the field writes them: ``4.1.8``, ``2.9.0-1``, ``2.13.0+cpu``, ``3.11``."""

from __future__ import annotations

import re
from functools import cache

VERSION = r"[0-9][\w.+~:-]{0,127}"  # of package managers, such as 1:2.9.0-1+deb12; nothing that needs quoting where it is rendered


@cache
def key(version: str) -> tuple[int, ...]:
    """The numbers of the upstream version, for comparisons: without epoch, Debian revision and local part."""
    upstream = version.split(":", 1)[-1].split("+", 1)[0].split("-", 1)[0]
    numbers = re.findall(r"\d+", upstream)
    if not numbers:
        raise ValueError(f"no number in version {version!r}")
    return tuple(int(number) for number in numbers)


def package_key(version: str) -> tuple[int, ...]:
    """All numbers of a package's version but the epoch: within a release, a larger revision or CUDA is newer."""
    return tuple(int(number) for number in re.findall(r"\d+", version.rpartition(":")[2]))


def minor(version: str) -> str:
    """``3.11.2`` → ``3.11``."""
    return ".".join(str(number) for number in key(version)[:2])
