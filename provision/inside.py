"""Names that come from outside, as paths: of an archive's members, and of what a list says lies in a folder."""

from __future__ import annotations

import tarfile
from pathlib import Path


def path_in(folder: Path, name: str) -> Path:
    """Where ``name`` leads from ``folder``.

    Raises:
        ValueError: that is not below the folder, by its words or by a link that lies there; or there are two ways to write it.
    """
    if not isinstance(name, str) or not name.isprintable() or any(part in ("", ".", "..") for part in name.split("/")):
        raise ValueError(f"{name!r} is not the name of a file below a folder")
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{name!r} leads out of its folder")
    return path


def is_plain(member: tarfile.TarInfo) -> bool:
    """Whether a member of an archive is a file whose content is in there: no link, no device, none that is larger than what was sent."""
    return member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not member.issparse()
