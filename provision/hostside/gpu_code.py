"""Which GPUs a shared library has code for, read from the file itself: no CUDA tool and no GPU is needed.

Python 3.6+, standard library only. nvcc puts GPU code into the section `.nv_fatbin` of an ELF file, in containers, about one for each
source file, with an entry for each architecture, as `cuobjdump` lists them. Only headers are read, which are not compressed where the
code is, by few small reads: a library of gigabytes takes milliseconds, and a file that lies costs no more.
"""

import os
import struct
from typing import Dict, Iterator, NamedTuple, Optional, Tuple

SECTION = b".nv_fatbin\0"
MAGIC = struct.pack("<I", 0xBA55ED50)
CONTAINER = struct.Struct("<4xHHQ")  # behind the magic: version, size of this header, size of the entries
ENTRY = struct.Struct("<HHIQ12xI8xQ")  # kind, version, size of this header, size of the code, architecture (90), flags
PTX, MACHINE_CODE = 1, 2
#: Flags: the code runs on exactly this architecture (sm_90a), or only within its family (sm_100f). Source: libraries made by nvcc 13.0.
SPECIFIC, FAMILY = 1 << 20, 1 << 21
SECTION_HEADER = struct.Struct("<II16xQQ24x")  # name, kind, (flags, address,) offset, size
MOST_SECTIONS = 10000
MOST_ENTRIES = 500000  # PyTorch's largest library has 20,000
LONGEST_GAP = 4096  # bytes between two containers, which are aligned


class GpuCode(NamedTuple):
    """The GPU code of a library.

    ``machine_code``, ``ptx``: architecture → number of containers that have code for it. An architecture is a compute capability
    (``9.0``), with ``a`` for code of exactly that one, and ``f`` for code of its family. A library whose kernels all have PTX of 9.0 has
    it in every one of its ``containers``.
    """

    containers: int
    machine_code: Dict[str, int]
    ptx: Dict[str, int]


class Damaged(ValueError):
    """An ELF file whose GPU code cannot be read."""


def read(path: str) -> Optional[GpuCode]:
    """The GPU code of a file; None for a file without any. Raises Damaged, and OSError for a file that cannot be read."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not block
    try:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
        section = find_section(file)
        return count(file, *section) if section else None
    except struct.error:
        raise Damaged("it ends too early")
    finally:
        os.close(file)


def part(file: int, at: int, size: int) -> bytes:
    """Bytes of the file; fewer, or none, behind its end."""
    return os.pread(file, size, at) if at < 1 << 62 else b""


def find_section(file: int) -> Optional[Tuple[int, int]]:
    """(offset, size) of the section with GPU code; None without one, or where this is no ELF file of 64 bits."""
    start = part(file, 0, 64)
    if len(start) < 64 or start[:6] != b"\x7fELF\x02\x01":
        return None
    (table,) = struct.unpack_from("<Q", start, 0x28)
    size, number, names = struct.unpack_from("<HHH", start, 0x3A)
    if not table or size != SECTION_HEADER.size or not names < number <= MOST_SECTIONS:
        return None  # without a table of sections, as some tools leave it
    headers = part(file, table, size * number)
    strings = SECTION_HEADER.unpack_from(headers, names * size)[2]
    for index in range(number):
        name, kind, offset, length = SECTION_HEADER.unpack_from(headers, index * size)
        if kind == 1 and part(file, strings + name, len(SECTION)) == SECTION:
            return offset, length
    return None


def count(file: int, at: int, length: int) -> GpuCode:
    """Count the architectures of the containers in a section."""
    found = GpuCode(0, {}, {})
    end = at + length
    left = MOST_ENTRIES
    while at + CONTAINER.size < end:
        header = part(file, at, CONTAINER.size)
        if header[: len(MAGIC)] != MAGIC:
            gap = part(file, at, min(LONGEST_GAP, end - at)).find(MAGIC)
            if gap < 0:
                if found.containers:
                    break  # padding at the end
                raise Damaged("its section %s has no container" % SECTION[:-1].decode())
            at += gap
            continue
        _version, size_of_header, size = CONTAINER.unpack(header)
        first, at = at + size_of_header, at + size_of_header + size
        if at > end or not size_of_header:
            raise Damaged("a container is larger than its section")
        in_container = set()
        for kind, architecture in entries(file, first, at):
            left -= 1
            if not left:
                raise Damaged("it has more than %d entries" % MOST_ENTRIES)
            in_container.add((kind, architecture))
        found = found._replace(containers=found.containers + 1)
        for kind, architecture in in_container:
            if kind in (PTX, MACHINE_CODE):
                counted = found.ptx if kind == PTX else found.machine_code
                counted[architecture] = counted.get(architecture, 0) + 1
    return found


def entries(file: int, at: int, end: int) -> Iterator[Tuple[int, str]]:
    """(kind, architecture) of the entries of a container."""
    while at + ENTRY.size <= end:
        kind, _version, header, size, architecture, flags = ENTRY.unpack(part(file, at, ENTRY.size))
        if header < ENTRY.size or architecture > 9999:
            raise Damaged("an entry's header is invalid")
        suffix = "a" if flags & SPECIFIC else "f" if flags & FAMILY else ""
        yield kind, "%d.%d%s" % (architecture // 10, architecture % 10, suffix)
        at += header + size
