"""Which GPUs a shared library has code for, read from the file itself: no CUDA tool and no GPU is needed.

Python 3.6+, standard library only. nvcc puts GPU code into the section `.nv_fatbin` of an ELF file, in containers, about one for each
source file, with an entry for each architecture, as `cuobjdump` lists them. Only headers are read, which are not compressed where the
code is, by few small reads: a library of gigabytes takes milliseconds, and a file that lies costs no more.

As a script it prints the host's GPUs and the GPU code of all libraries in the environment of the Python that runs it::

    {"gpus": [{"name": …, "compute_capability": "9.0"}, …], "complete": whether there was time for all,
     "libraries": [{"path": …, "containers": n, "machine_code": {"9.0": n, …}, "ptx": {…}}, …]}

What it has found is kept in the user's cache folder, by each file's path, size and time. Compute capabilities as arguments count instead of
the host's GPUs.
"""

import itertools
import json
import os
import re
import struct
import subprocess
import sys
import sysconfig
import time
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

SECTION = b".nv_fatbin\0"
MAGIC = struct.pack("<I", 0xBA55ED50)
CONTAINER = struct.Struct("<4xHHQ")  # behind the magic: version, size of this header, size of the entries
# Kind, version, size of this header, size of the code, architecture (90), flags, size of the code where it is not compressed (0: it is not).
ENTRY = struct.Struct("<HHIQ12xI8xQ8xQ")
PTX, MACHINE_CODE = 1, 2
EMPTY = (0, "")  # an entry that each container costs, as one may have none
#: Flags: the code runs on exactly this architecture (sm_90a), or only within its family (sm_100f). Source: libraries made by nvcc 13.0.
SPECIFIC, FAMILY = 1 << 20, 1 << 21
SECTION_HEADER = struct.Struct("<II16xQQ24x")  # name, kind, (flags, address,) offset, size
#: Bytes of machine code with a kernel. Less is what the device linker leaves, for one architecture, of a library that has its kernels, for
#: all, outside of the section: 1,896 in cuFFT of CUDA 13.2.
SMALLEST_CODE = 2048
MAX_SECTIONS = 10000
MAX_ENTRIES = 500000  # and containers; PyTorch's largest library has 20,000
LONGEST_GAP = 4096  # bytes between two containers, which are aligned
LIBRARY = re.compile(r"\.so(\.[0-9.]+)?$")
SMALLEST = 4096  # bytes of a library with GPU code
MAX_LIBRARIES = 5000
SCAN_S = 40.0  # what is left then is read by the next run
GPUS = "/proc/driver/nvidia/gpus"
SMI_S = 20.0  # without the persistence daemon it wakes every GPU first
CACHE = "gpu-code-2.json"  # the number is another where a library is read in another way
LARGEST_CACHE = 16 << 20  # bytes


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
        code = count(file, *section) if section else None
        return code if code and code.containers else None
    except struct.error:
        raise Damaged("it ends too early")
    finally:
        os.close(file)


def part(file: int, at: int, size: int) -> bytes:
    """Bytes of the file; fewer, or none, behind its end."""
    return os.pread(file, size, at) if at < 1 << 62 else b""


def find_section(file: int) -> Optional[Tuple[int, int]]:
    """(offset, size) of the section with GPU code; None without one, or for another file than ELF of 64 bits."""
    start = part(file, 0, 64)
    if len(start) < 64 or start[:6] != b"\x7fELF\x02\x01":
        return None
    (table,) = struct.unpack_from("<Q", start, 0x28)
    size, number, names = struct.unpack_from("<HHH", start, 0x3A)
    if not table or size != SECTION_HEADER.size or not names < number <= MAX_SECTIONS:
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
    start, end = at, at + length
    left = MAX_ENTRIES
    while at + CONTAINER.size < end:
        header = part(file, at, CONTAINER.size)
        if header[: len(MAGIC)] != MAGIC:
            gap = part(file, at, min(LONGEST_GAP, end - at)).find(MAGIC)
            if gap < 0:
                if at > start:
                    break  # padding at the end
                raise Damaged("its section %s has no container" % SECTION[:-1].decode())
            at += gap
            continue
        _version, size_of_header, size = CONTAINER.unpack(header)
        first, at = at + size_of_header, at + size_of_header + size
        if at > end or not size_of_header:
            raise Damaged("a container is larger than its section")
        in_container = set()
        for entry in itertools.chain([EMPTY], entries(file, first, at)):
            left -= 1
            if left < 0:
                raise Damaged("it has more than %d containers and entries" % MAX_ENTRIES)
            in_container.add(entry)
        found = found._replace(containers=found.containers + (len(in_container) > 1))
        for kind, architecture in in_container:
            if kind in (PTX, MACHINE_CODE):
                counted = found.ptx if kind == PTX else found.machine_code
                counted[architecture] = counted.get(architecture, 0) + 1
    return found


def entries(file: int, at: int, end: int) -> Iterator[Tuple[int, str]]:
    """(kind, architecture) of the entries of a container."""
    while at + ENTRY.size <= end:
        kind, _version, header, size, architecture, flags, unpacked = ENTRY.unpack(part(file, at, ENTRY.size))
        if header < ENTRY.size or architecture > 9999:
            raise Damaged("an entry's header is invalid")
        suffix = "a" if flags & SPECIFIC else "f" if flags & FAMILY else ""
        if kind != MACHINE_CODE or max(size, unpacked) >= SMALLEST_CODE:
            yield kind, "%d.%d%s" % (architecture // 10, architecture % 10, suffix)
        at += header + size


def libraries() -> Iterator[str]:
    """The libraries in the environment of this Python: in the folders from which it imports, except its own library's."""
    own = {os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    folders = [os.path.realpath(each) for each in sys.path if os.path.isabs(each)]
    below: Set[str] = set()
    for folder in folders:
        if folder in own or os.path.dirname(folder) in own and os.path.basename(folder) == "lib-dynload":
            continue
        for place, names, files in os.walk(folder):
            if place in below:
                names[:] = []
                continue
            below.add(place)
            names[:] = [name for name in names if name not in ("__pycache__", ".git", "node_modules")]
            for name in files:
                if LIBRARY.search(name):
                    yield os.path.join(place, name)


def scan(known: Dict[str, Any], deadline: float) -> Tuple[Dict[str, Any], bool]:
    """(what there is to know of each library, whether there was time for all). ``known``: what an earlier scan has found."""
    found: Dict[str, Any] = {}
    for path in libraries():
        if len(found) >= MAX_LIBRARIES or time.monotonic() > deadline:
            return found, False
        try:
            status = os.stat(path)
            if status.st_size < SMALLEST:
                continue
            stamp = [status.st_size, status.st_mtime_ns]
            entry = known.get(path)
            if not (isinstance(entry, dict) and entry.get("stamp") == stamp and "code" in entry):
                code = read(path)
                entry = {"stamp": stamp, "code": dict(code._asdict()) if code else None}
        except (OSError, Damaged):
            continue  # what cannot be read cannot be loaded, and says so itself
        found[path] = entry
    return found, True


def gpus(kept: Any) -> Tuple[Any, List[Dict[str, str]]]:
    """(what tells these GPUs from others, the GPUs). ``kept``: the same of an earlier run: asking the driver takes seconds."""
    present = []
    try:
        for name in sorted(os.listdir(GPUS)):
            with open(os.path.join(GPUS, name, "information"), errors="replace") as file:
                present.append([name, file.read(4096)])
    except OSError:
        present = []
    if present and isinstance(kept, list) and len(kept) == 2 and kept[0] == present and kept[1]:
        return kept[0], kept[1]
    command = ["nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, timeout=SMI_S)
    except (OSError, subprocess.SubprocessError):
        return present, []
    rows = [line.rpartition(",") for line in answer.stdout.decode(errors="replace").splitlines()]
    return present, [
        {"name": name.strip(), "compute_capability": capability.strip()}
        for name, _, capability in rows
        if re.match(r"\d+\.\d$", capability.strip())
    ]


def read_cache(path: str) -> Dict[str, Any]:
    try:
        with open(path) as file:
            kept = json.loads(file.read(LARGEST_CACHE))
    except (OSError, ValueError, RecursionError):
        return {}
    return kept if isinstance(kept, dict) and isinstance(kept.get("libraries"), dict) else {}


def write_cache(path: str, kept: Dict[str, Any]) -> None:
    try:
        os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
        draft = "%s.%d" % (path, os.getpid())
        with open(draft, "w") as file:
            json.dump(kept, file)
        os.replace(draft, path)
    except OSError:
        pass  # a home without room: the next run reads everything again


def main() -> None:
    deadline = time.monotonic() + SCAN_S
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    cache = os.path.join(folder, "provision", CACHE)
    kept = read_cache(cache)
    planned = [{"name": "GPU", "compute_capability": each} for each in sys.argv[1:]]
    identity, present = (None, planned) if planned else gpus(kept.get("gpus"))
    found, complete = scan(kept.get("libraries", {}), deadline) if present else ({}, True)
    if present:
        new = {"gpus": [identity, present], "libraries": found}
        if new != kept:
            write_cache(cache, new)
    with_code = [dict(entry["code"], path=path) for path, entry in found.items() if entry["code"]]
    print(json.dumps({"gpus": present, "libraries": with_code, "complete": complete}))


if __name__ == "__main__":
    main()
