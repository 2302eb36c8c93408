"""The folders of runs, and the files in them: the one order, and the one way to read what may be of another version or anything else."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from provision.base import downloads, paths

LARGEST_FILE = 32 << 20  # bytes of a file that is read; facts and plan of 300 hosts have a few millions


def newest_first() -> list[Path]:
    """The folders of all runs, by their names, which begin with date and time. A symbolic link (``latest``) is another name of one."""
    try:
        found = [each for each in paths.runs().iterdir() if re.match(r"2\d", each.name)]
        return sorted((each for each in found if each.is_dir() and not each.is_symlink()), reverse=True)
    except OSError:
        return []


def tail(path: Path, most: int) -> list[str]:
    """The lines in the last ``most`` bytes of a file, the first perhaps without its begin; none where it cannot be read."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - most))
        return file.read(most).decode(errors="replace").splitlines()
    return []


def content(path: Path, most: int | None = None) -> bytes | None:
    """What a file holds; None where it is missing, no file, or larger than ``most`` bytes (by default `LARGEST_FILE`)."""
    try:
        return downloads.file_content(path, LARGEST_FILE if most is None else most)
    except (OSError, downloads.Unavailable):
        return None
