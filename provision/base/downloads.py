"""Downloads of the controller, verified by SHA-256 and cached.

A file is verified before it enters the cache and whenever it is used, and is written under a temporary name and renamed: a partial,
damaged or foreign file is never used, and two controllers at once do not interfere.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import io
import netrc
import os
import shutil
import ssl
import stat
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from provision.base import paths, uv_support
from provision.base.errors import ProvisionError, UsageError
from provision.base.text import duration

# A server that sends nothing for this long counts as unavailable.
SILENCE_SECONDS = 12.0
# So does one that needs longer for one file.
FILE_SECONDS = 600.0
# The same for a file on its way to the disk: PyTorch's wheel for CUDA is a gigabyte.
LARGE_FILE_SECONDS = 3600.0
CHUNK_BYTES = 1 << 16
# What a killed controller left in the cache is removed once it is older than any download can be.
LEFTOVER_SECONDS = 24 * 3600.0
# No key or data set is larger; an endless response must not fill the memory.
LARGEST_BYTES = 512 << 20
# The same on the disk: PyTorch's wheels for CUDA have a few gigabytes.
LARGEST_FILE_BYTES = 8 << 30

Say = Callable[[str], None]  # is called with a line about what takes long


class Unavailable(Exception):
    """Why a file is unavailable from a server; ``whole_server`` when its other files are, too."""

    def __init__(self, why: str, *, whole_server: bool = False) -> None:
        super().__init__(why)
        self.whole_server = whole_server


def read(
    url: str,
    *,
    size: int | None = None,
    sha256: str | None = None,
    largest: int = LARGEST_BYTES,
    seconds: float | None = None,
    opener: urllib.request.OpenerDirector | None = None,
) -> bytes:
    """The content behind ``url``, checked against ``size`` in bytes and ``sha256`` where they are known; raises Unavailable.

    Proxies and SSL_CERT_FILE are honoured by urllib, unless ``opener`` reaches the server.
    """
    content = io.BytesIO()
    _receive(url, content, size=size, sha256=sha256, largest=largest, seconds=FILE_SECONDS if seconds is None else seconds, opener=opener)
    return content.getvalue()


def opened_file(path: Path, what: str | None = None) -> IO[bytes]:
    """A regular file. Raises Unavailable, which says ``what`` it is, for anything else, such as a pipe, which would block."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(file).st_mode):
        return os.fdopen(file, "rb")
    os.close(file)
    raise Unavailable(f"{what or path} is not a regular file")


def content_of(source: IO[bytes], what: str, largest: int) -> bytes:
    """The rest of a file or an answer. Raises Unavailable, which says ``what`` it is, where that is too large."""
    content = source.read(largest + 1)
    if len(content) > largest:
        raise Unavailable(f"{what} is larger than {largest:,} bytes")
    return content


def file_content(path: Path, largest: int, what: str | None = None) -> bytes:
    """What a file holds. Raises Unavailable as these do, and OSError."""
    with opened_file(path, what) as file:
        return content_of(file, what or str(path), largest)


def _receive(
    url: str,
    out: IO[bytes],
    *,
    size: int | None = None,
    sha256: str | None,
    largest: int,
    seconds: float,
    opener: urllib.request.OpenerDirector | None = None,
) -> None:
    """Write what is behind ``url`` to ``out``, as `read`; it is checked when all of it is there."""
    deadline = time.monotonic() + seconds
    received, checksum = 0, hashlib.sha256()
    for chunk in _chunks(url, opener):
        received += len(chunk)
        checksum.update(chunk)
        out.write(chunk)
        if received > (largest if size is None else size):
            raise Unavailable(f"more than the {size or largest:,} bytes that the file has; probably an error page")
        if time.monotonic() > deadline:
            of = f" of {size:,}" if size is not None else ""
            raise Unavailable(f"only {received:,}{of} bytes after {duration(seconds)}", whole_server=True)
    if size is not None and received != size:
        raise Unavailable(f"truncated: {received:,} of {size:,} bytes")
    if sha256 is not None and (found := checksum.hexdigest()) != sha256:
        raise Unavailable(f"wrong content: SHA-256 {found[:12]}…, expected {sha256[:12]}…")


def _chunks(url: str, opener: urllib.request.OpenerDirector | None) -> Iterator[bytes]:
    """What is behind ``url``, as it comes. All errors of the network, and no others, are Unavailable."""
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise Unavailable("not an http or https address", whole_server=True)
    request = urllib.request.Request(url, headers={"User-Agent": "provision"})  # noqa: S310 (scheme checked above)
    try:
        with (opener.open if opener else urllib.request.urlopen)(request, timeout=SILENCE_SECONDS) as answer:
            while chunk := answer.read1(CHUNK_BYTES):
                yield chunk
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


def index_opener(url: str, setup: uv_support.Setup) -> urllib.request.OpenerDirector:
    """What reaches a server as pip and uv do: with pip's certificates and proxy, and the login of the index on that server.

    ``url`` has no login.
    """
    settings, variables, _ = setup
    server = urllib.parse.urlsplit(url)
    context = ssl.create_default_context(cafile=variables.get("SSL_CERT_FILE"))
    if "SSL_CLIENT_CERT" in variables:
        context.load_cert_chain(variables["SSL_CLIENT_CERT"])
    if {server.hostname, f"{server.hostname}:{server.port}"} & set(settings["allow-insecure-host"]):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    handlers: list[urllib.request.BaseHandler] = [urllib.request.HTTPSHandler(context=context)]
    if "ALL_PROXY" in variables:
        handlers.append(urllib.request.ProxyHandler({"http": variables["ALL_PROXY"], "https": variables["ALL_PROXY"]}))
    listed = (settings.get("index-url", ""), *settings["extra-index-url"], *settings["find-links"])
    places = [urllib.parse.urlsplit(place) for place in listed]
    logins = [
        (urllib.parse.unquote(place.username), urllib.parse.unquote(place.password or ""))
        for place in places
        if place.username and (place.hostname, place.port) == (server.hostname, server.port)
    ]
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        known = netrc.netrc().authenticators(server.hostname or "")
        logins += [(known[0], known[2] or "")] if known else []
    if logins:
        passwords = urllib.request.HTTPPasswordMgrWithPriorAuth()
        passwords.add_password(None, f"{server.scheme}://{server.netloc}/", *logins[0], is_authenticated=True)
        handlers.append(urllib.request.HTTPBasicAuthHandler(passwords))
    return urllib.request.build_opener(*handlers)


def store(path: Path, content: bytes) -> None:
    """Write a file atomically: under a temporary name, synced to disk, then renamed."""
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


def remove_leftovers(folder: Path) -> None:
    """Remove partial files of killed controllers, never those of a running one."""
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
    say: Say = lambda _line: None,
    opener: urllib.request.OpenerDirector | None = None,
) -> Path:
    """The file behind ``url`` in the cache, downloaded unless it is there already.

    Args:
        what: name for messages, e.g. ``the sources of Open MPI 4.1.8``.
        hint: what the user can do when it is unavailable.
        opener: how to reach the server, where that is not what the environment says.

    Raises:
        ProvisionError: it is unavailable, or not the expected file.
    """
    folder = paths.cache() / "downloads"
    path = folder / f"{sha256[:12]}-{Path(urllib.parse.urlsplit(url).path).name or 'file'}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
        if path.exists() and digest(path) == sha256:
            return path
        say(f"fetching {what}: {url}")
        with _stored(path) as out:
            _receive(url, out, sha256=sha256, largest=LARGEST_FILE_BYTES, seconds=LARGE_FILE_SECONDS, opener=opener)
    except Unavailable as error:
        raise ProvisionError(f"cannot download {what}: {error}", where=url, hint=hint) from error
    except OSError as error:
        raise ProvisionError(
            f"cannot keep {what}: {error}", where=str(folder), hint="free or fix this folder, or set PROVISION_CACHE"
        ) from error
    return path


def local_path(place: str) -> Path | None:
    """The path of a ``file:`` address, or of what is not an address; None for other addresses."""
    parts = urllib.parse.urlsplit(place)
    return Path(urllib.parse.unquote(parts.path)) if parts.scheme in ("", "file") else None


def check_user_file(path: Path, sha256: str | None, *, what: str) -> Path:
    """Check a user file against ``sha256``, where that is known; returns its path.

    Raises:
        UsageError: it cannot be read, or has another checksum.
    """
    try:
        found = digest(path)
    except OSError as error:
        raise UsageError(f"cannot read {what}: {error.strerror}", where=str(path)) from error
    if sha256 is not None and found != sha256:
        raise UsageError(
            f"it is not {what}: its SHA-256 is {found[:12]}…, expected {sha256[:12]}…; nothing of it was used",
            where=str(path),
            hint="download it again, and compare its checksum with the published one",
        )
    return path


def link_or_copy(file: Path, target: Path) -> None:
    """The content of a file under another path: a hard link to a file of our cache where that works, because it may be large.

    Files of the user are copied: a link changes their status time (ctime), by which uv knows whether a wheel in a folder is still the one
    that it has unpacked. It would unpack PyTorch into its cache again and again.
    """
    file = file.resolve()
    target.unlink(missing_ok=True)
    if file.is_relative_to(paths.cache().resolve()):
        with contextlib.suppress(OSError):  # another file system
            os.link(file, target)
            return
    shutil.copyfile(file, target)
