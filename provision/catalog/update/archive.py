"""Files in a wheel, read where the wheel lies: of one on a server that knows ranges only the parts that are needed are fetched."""

from __future__ import annotations

import contextlib
import io
import lzma
import os
import re
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from provision.base.downloads import Unavailable, local_path, opened_file
from provision.catalog.update.package_index import Wheel
from provision.catalog.update.sources import Sources

_LARGEST_TEXT = 4 << 20  # of a text in a wheel
_LARGEST_LIBRARY = 4 << 30  # of a library in a wheel
_BLOCK = 1 << 22  # bytes that are fetched at once
_LARGEST_WHEEL = 8 << 30
_LARGEST_DIRECTORY = 32 << 20  # that are read until a wheel's list of files is known: PyTorch's has 2 MB
#: What reading an archive raises where its content is not what it says.
DAMAGED = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError, UnicodeDecodeError, NotImplementedError, RuntimeError)


class _Parts(io.RawIOBase):
    """A file of which parts are fetched when they are read. ``left``: bytes that may be; None for all."""

    def __init__(self, size: int, fetch: Callable[[int, int], bytes]) -> None:
        self._size, self._fetch, self._at = size, fetch, 0
        self.left: int | None = _LARGEST_DIRECTORY

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, (0, self._at, self._size)[whence] + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        size = min(len(buffer), self._size - self._at)
        if size <= 0:
            return 0
        if self.left is not None:
            self.left -= size
            if self.left < 0:
                raise Unavailable(f"its list of files is larger than {_LARGEST_DIRECTORY:,} bytes")
        part = self._fetch(self._at, size)
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)


@contextlib.contextmanager
def opened_wheel(wheel: Wheel, sources: Sources) -> Iterator[zipfile.ZipFile]:
    """A wheel, opened where it lies; one on a server without ranges is fetched whole."""

    def fetched(at: int, size: int) -> bytes:
        with sources.opened(wheel.url, {"Range": f"bytes={at}-{at + size - 1}"}) as answer:
            if answer.status != 206:
                raise Unavailable("the server knows no ranges")
            part: bytes = answer.read(size)
        return part

    with contextlib.ExitStack() as stack:
        whole = None
        if (path := local_path(wheel.url)) is not None:
            whole = stack.enter_context(opened_file(path))
        else:
            with sources.opened(wheel.url, {"Range": "bytes=0-0"}) as answer:
                total = re.fullmatch(r"bytes 0-0/(\d{1,12})", answer.headers.get("Content-Range") or "") if answer.status == 206 else None
                if total is None:
                    whole = stack.enter_context(tempfile.TemporaryFile())
                    _copy(answer, whole, _LARGEST_WHEEL)
        if whole is not None:
            file = whole.fileno()
            parts = _Parts(whole.seek(0, io.SEEK_END), lambda at, size: os.pread(file, size, at))
        elif total and int(total[1]) <= _LARGEST_WHEEL:
            parts = _Parts(int(total[1]), fetched)
        else:
            raise Unavailable(f"a file of more than {_LARGEST_WHEEL:,} bytes")
        try:
            archive = stack.enter_context(zipfile.ZipFile(io.BufferedReader(parts, _BLOCK)))
        except (MemoryError, OverflowError) as error:
            raise Unavailable("its list of files is too large") from error
        parts.left = None
        yield archive


def _copy(source: IO[bytes], target: IO[bytes], largest: int) -> None:
    size = 0
    while block := source.read(_BLOCK):
        size += len(block)
        if size > largest:
            raise Unavailable(f"a file of more than {largest:,} bytes")
        target.write(block)


def text_of(archive: zipfile.ZipFile, name: str) -> str:
    """A text in a wheel, empty where it is missing or too large."""
    if name not in archive.namelist():
        return ""
    with archive.open(name) as file:
        content = file.read(_LARGEST_TEXT + 1)
    return content.decode("utf-8", "replace") if len(content) <= _LARGEST_TEXT else ""


@contextlib.contextmanager
def unpacked(archive: zipfile.ZipFile, name: str) -> Iterator[Path]:
    """A library of a wheel, unpacked into a file of ours."""
    if name not in archive.namelist():
        raise Unavailable(f"it has no {name}")
    with tempfile.NamedTemporaryFile(prefix="provision-", suffix=".so") as target:
        with archive.open(name) as file:
            _copy(file, target, _LARGEST_LIBRARY)
        target.flush()
        yield Path(target.name)
