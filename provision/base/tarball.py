"""Version and checksum of a source tarball."""

from __future__ import annotations

import re
import tarfile
from dataclasses import dataclass
from pathlib import Path

from provision.base import downloads
from provision.base.errors import UsageError

_VERSION_FILE = re.compile(r"(\./)?[^/]+/makefiles/version\.mk")
_VERSION_FILE_BYTES = 1 << 16


@dataclass(frozen=True)
class Sources:
    """The user's source tarball."""

    path: Path
    version: str
    sha256: str


def nccl(path: Path) -> Sources:
    """A tarball of NCCL's sources under any file name; its release, e.g. ``2.22.3``, is from its ``makefiles/version.mk``.

    Raises:
        UsageError: it cannot be read to its end, or does not contain NCCL's sources.
    """
    hint = "give GitHub's archive of a tag (nccl-2.22.3-1.tar.gz) or Debian's nvidia-nccl_2.22.3-1.orig.tar.gz"
    texts = []
    try:
        with tarfile.open(path) as tar:
            for member in tar:  # to its end: half a download is noticed here
                file = tar.extractfile(member) if member.isfile() and _VERSION_FILE.fullmatch(member.name) else None
                if file is not None:
                    texts.append(file.read(_VERSION_FILE_BYTES).decode("utf-8", "replace"))
    except (OSError, EOFError, tarfile.TarError) as error:
        reason = str(error).partition("\n")[0].rstrip(":")  # the rest lists everything that tarfile has tried
        raise UsageError(f"cannot be read as a tarball: {reason}", where=str(path), hint=hint) from error
    numbers = [re.search(rf"^NCCL_{part}\s*:?=\s*(\d+)\s*$", texts[0], re.M) for part in ("MAJOR", "MINOR", "PATCH")] if texts else []
    if len(texts) != 1 or None in numbers:
        raise UsageError("not the sources of NCCL: makefiles/version.mk, which names the release, is missing", where=str(path), hint=hint)
    return Sources(path.resolve(), ".".join(number[1] for number in numbers if number), downloads.digest(path))
