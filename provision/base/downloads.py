"""Files from elsewhere, fetched once by the controller and checked before anybody uses them.

Everything that enters the cache has passed its SHA-256, is written under a name of its own and renamed into place, and is checked again
whenever it is used: a half-written, damaged or foreign file is never handed on, and two controllers at once do not meet.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import io
import math
import os
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from provision.base import paths
from provision.base.errors import ProvisionError, UsageError

# A server that sends nothing for this long is given up.
SILENCE_SECONDS = 12.0
# A server that trickles is given up after this long for one file.
FILE_SECONDS = 600.0
# The same for a file on its way to the disk: PyTorch's wheel for CUDA is a gigabyte.
LARGE_FILE_SECONDS = 3600.0
CHUNK_BYTES = 1 << 16
# What a killed controller left in the cache is removed when it is older than any download can be.
LEFTOVER_SECONDS = 24 * 3600.0
# No key or data set is larger; an endless answer must not fill the memory.
LARGEST_BYTES = 512 << 20


class Unavailable(Exception):
    """Why one file cannot be had from one server; ``whole_server`` when asking it for other files is no use either."""

    def __init__(self, why: str, *, whole_server: bool = False) -> None:
        super().__init__(why)
        self.whole_server = whole_server


def read(url: str, *, size: int | None = None, sha256: str | None = None) -> bytes:
    """The content behind ``url``, checked against ``size`` in bytes and ``sha256`` as far as they are given; raises Unavailable.

    Proxies and SSL_CERT_FILE are honoured by urllib.
    """
    content = io.BytesIO()
    _receive(url, content, size=size, sha256=sha256, largest=LARGEST_BYTES, seconds=FILE_SECONDS)
    return content.getvalue()


def _receive(
    url: str,
    out: IO[bytes],
    *,
    size: int | None = None,
    sha256: str | None,
    largest: float,
    seconds: float,
    opener: urllib.request.OpenerDirector | None = None,
) -> None:
    """Write what is behind ``url`` to ``out``, as `read`; it is checked when all of it is there."""
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise Unavailable("not an http or https address", whole_server=True)
    request = urllib.request.Request(url, headers={"User-Agent": "provision"})  # noqa: S310 (scheme checked above)
    deadline = time.monotonic() + seconds
    received, checksum = 0, hashlib.sha256()
    try:
        with (opener.open if opener else urllib.request.urlopen)(request, timeout=SILENCE_SECONDS) as answer:
            while chunk := answer.read1(CHUNK_BYTES):
                received += len(chunk)
                checksum.update(chunk)
                out.write(chunk)
                if received > (largest if size is None else size):
                    raise Unavailable(f"more than the {size or largest:,} bytes that the file has; probably an error page")
                if time.monotonic() > deadline:
                    of = f" of {size:,}" if size is not None else ""
                    raise Unavailable(f"only {received:,}{of} bytes after {seconds:.0f} s", whole_server=True)
    except urllib.error.HTTPError as error:
        raise Unavailable(f"HTTP {error.code} {error.reason}") from error
    except TimeoutError as error:
        raise Unavailable(f"silent for {SILENCE_SECONDS:g} s", whole_server=True) from error
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            raise Unavailable(f"no connection in {SILENCE_SECONDS:g} s", whole_server=True) from error
        raise Unavailable(str(error.reason), whole_server=True) from error
    except (http.client.HTTPException, OSError, ValueError) as error:
        raise Unavailable(f"{type(error).__name__}: {error}", whole_server=True) from error
    if size is not None and received != size:
        raise Unavailable(f"truncated: {received:,} of {size:,} bytes")
    if sha256 is not None and (found := checksum.hexdigest()) != sha256:
        raise Unavailable(f"wrong content: SHA-256 {found[:12]}…, expected {sha256[:12]}…")


def store(path: Path, content: bytes) -> None:
    """Write ``path`` so that nobody ever sees a part of it: own temporary name, on disk, then renamed."""
    with _stored(path) as out:
        out.write(content)


@contextlib.contextmanager
def _stored(path: Path) -> Iterator[IO[bytes]]:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def sweep(folder: Path) -> None:
    """Remove what killed controllers left; never what a running one is writing."""
    for part in folder.glob(".*.part"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - part.stat().st_mtime > LEFTOVER_SECONDS:
                part.unlink()


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        found = hashlib.sha256()
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def fetch(
    url: str,
    sha256: str,
    *,
    what: str,
    hint: str,
    say: Callable[[str], None] = lambda _line: None,
    opener: urllib.request.OpenerDirector | None = None,
) -> Path:
    """The file behind ``url`` in the cache; nothing is fetched when it is there already.

    Args:
        sha256: what the file must have; nothing of another one is kept.
        what: how the user knows it, e.g. ``the sources of Open MPI 4.1.8``.
        hint: what they can do when it cannot be had.
        opener: how the server is reached, where that is not what the environment says.

    Raises:
        ProvisionError: it cannot be had, or is not the expected one.
    """
    folder = paths.cache() / "downloads"
    path = folder / f"{sha256[:12]}-{Path(urllib.parse.urlsplit(url).path).name or 'file'}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sweep(folder)
        if path.exists() and digest(path) == sha256:
            return path
        say(f"fetching {what}: {url}")
        with _stored(path) as out:
            _receive(url, out, sha256=sha256, largest=math.inf, seconds=LARGE_FILE_SECONDS, opener=opener)
    except Unavailable as error:
        raise ProvisionError(f"{what} cannot be had: {error}; nothing of it was used", where=url, hint=hint) from error
    except OSError as error:
        raise ProvisionError(
            f"cannot keep {what}: {error}", where=str(folder), hint="free or fix this folder, or set PROVISION_CACHE"
        ) from error
    return path


def given(path: Path, sha256: str | None, *, what: str) -> Path:
    """A file of the user's, checked against ``sha256`` where that is known.

    Raises:
        UsageError: it cannot be read, or is not the one that the checksum belongs to.
    """
    try:
        found = digest(path)
    except OSError as error:
        raise UsageError(f"cannot read {what}: {error.strerror}", where=str(path)) from error
    if sha256 is not None and found != sha256:
        raise UsageError(
            f"it is not {what}: its SHA-256 is {found[:12]}…, expected {sha256[:12]}…; nothing of it was used",
            where=str(path),
            hint="fetch it again, and compare its checksum with the one its makers publish",
        )
    return path
