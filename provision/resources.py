"""Finds what travels with the toolkit: playbooks, the engine's sources, image templates, scripts for the hosts.

In a checkout they lie beside the package, in an installed wheel inside it; nothing else needs to know which.
"""

from __future__ import annotations

import base64
import shlex
import zlib
from pathlib import Path

from provision.errors import ProvisionError

_PACKAGE = Path(__file__).resolve().parent


def folder(name: str) -> Path:
    """The folder ``playbooks``, ``collective_core`` or ``images``; raises ProvisionError when the installation lacks it."""
    for place in (_PACKAGE / "_bundled" / name, _PACKAGE.parent / name):
        if place.is_dir():
            return place
    raise ProvisionError(
        f"the installation of provision lacks its folder {name!r}", todo="install it again: pip install --force-reinstall provision"
    )


def hostside(name: str) -> Path:
    """A script that runs on a host, e.g. ``survey.py``."""
    return _PACKAGE / "hostside" / name


def inline_command(script: Path, *arguments: str, interpreter: str = "python3") -> str:
    """A shell command that carries ``script`` whole: one round trip, nothing to copy first and nothing to clean up after.

    The script is compressed, so that it stays well below the 128 KiB that Linux allows one argument.
    """
    packed = base64.b64encode(zlib.compress(script.read_bytes(), 9)).decode()
    loader = f"import base64,zlib;exec(compile(zlib.decompress(base64.b64decode('{packed}')),'{script.name}','exec'))"
    return " ".join([interpreter, "-c", shlex.quote(loader), *map(shlex.quote, arguments)])
