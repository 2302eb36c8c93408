"""Read from the NCCL in a wheel which GPUs it has code for: the catalogue's `code` of wheels.

    pip download --no-deps nvidia-nccl-cu12==2.28.9 -d wheels; python scripts/nccl_architectures.py wheels/*.whl

For each wheel it prints the CUDA that it was built for and the compute capabilities of its machine code. PTX, which the driver compiles for
newer GPUs, does not count: from 2.27.3 on a few kernels have it, the others not. No CUDA tool is needed: nvcc puts the code into the
section `.nv_fatbin`, in containers with an entry for each architecture, as cuobjdump lists them.
"""

from __future__ import annotations

import mmap
import re
import struct
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

_CONTAINER = struct.Struct("<IHHQ")  # magic, version, size of this header, size of the entries
_ENTRY = struct.Struct("<HHIQ12xI")  # kind, version, size of this header, size of the code, architecture: 90
_MAGIC = 0xBA55ED50
_MACHINE_CODE = 2  # 1 is PTX


def _section(library: mmap.mmap, wanted: bytes) -> tuple[int, int]:
    """(offset, size) of a section of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", library, 0x28)
    size, count, names = struct.unpack_from("<HHH", library, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", library, table + index * size) for index in range(count)]
    strings = headers[names][4]
    for name, _kind, _flags, _address, offset, length in headers:
        if library[strings + name : library.find(b"\0", strings + name)] == wanted:
            return offset, length
    raise SystemExit(f"the library has no section {wanted.decode()}")


def _code(library: mmap.mmap) -> Iterator[tuple[int, int]]:
    """(kind, architecture) of all code in the library."""
    at, length = _section(library, b".nv_fatbin")
    end = at + length
    while at + _CONTAINER.size <= end:
        magic, _version, header, size = _CONTAINER.unpack_from(library, at)
        if magic != _MAGIC:
            at += 8  # containers are aligned
            continue
        entry, at = at + header, at + header + size
        while entry < at:
            kind, _version, header, size, architecture = _ENTRY.unpack_from(library, entry)
            yield kind, architecture
            entry += header + size


def architectures(library: mmap.mmap) -> list[str]:
    """The compute capabilities of machine code, lowest first: ``["7.0", "9.0"]``."""
    found = sorted({architecture for kind, architecture in _code(library) if kind == _MACHINE_CODE})
    return [f"{number // 10}.{number % 10}" for number in found]


def main() -> None:
    """Print a line for each wheel."""
    for wheel in map(Path, sys.argv[1:]):
        with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith("libnccl.so.2"))
            with open(archive.extract(name, folder), "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library:
                found = re.search(rb"NCCL version (\d+\.\d+\.\d+)[^\0+]*\+cuda(\d+\.\d+)", library)
                version, cuda = (part.decode() for part in found.groups()) if found else ("?", "?")
                print(f"{wheel.name}: NCCL {version}, CUDA {cuda}: {', '.join(architectures(library))}")


if __name__ == "__main__":
    main()
