"""Which GPUs a shared library has code for, read from the file itself: no tool of CUDA or ROCm and no GPU is needed.

Python 3.6+, standard library only. nvcc puts GPU code into the section `.nv_fatbin` of an ELF file, in containers, about one for each
source file, with an entry for each architecture, as `cuobjdump` lists them; hipcc into `.hip_fatbin`, in offload bundles. Only headers are
read, by few small reads: a library of gigabytes takes milliseconds, and a file that lies costs no more. Of a bundle that is compressed, the
first block is decompressed. Files of rocBLAS and kpack archives have code for the target in their names; a folder of them is one library.

As a script it prints the host's GPUs and the GPU code of all libraries in the environment of the Python that runs it::

    {"gpus": [{"name": …, "architecture": "9.0"}, …], "complete": whether there was time for all,
     "libraries": [{"path": …, "containers": n, "machine_code": {"9.0": n, …}, "ptx": {…}}, …]}

What it has found is kept in the user's cache folder, by each file's path, size and time. Compute capabilities as arguments count instead of
the host's GPUs.
"""

import ctypes
import glob
import itertools
import json
import os
import re
import struct
import subprocess
import sys
import sysconfig
import time
import zlib
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Set, Tuple

SECTION = re.compile(br"\.(nv|hip)_fatbin\0")
MAGIC = struct.pack("<I", 0xBA55ED50)
#: Of LLVM's ClangOffloadBundler, where the layouts are documented.
BUNDLE, COMPRESSED = b"__CLANG_OFFLOAD_BUNDLE__", b"CCOB"
ANY_MAGIC = re.compile(b"|".join((MAGIC, BUNDLE, COMPRESSED)))
BUNDLE_ENTRY = struct.Struct("<QQQ")  # behind the number of entries: offset, size, length of the name that follows
BUNDLE_HEADER = 16384  # bytes at most; one of 26 targets has 1,500
COMPRESSED_HEADER = {2: struct.Struct("<8xI12x"), 3: struct.Struct("<8xQ16x")}  # by its version: the size with this header
ZSTD = 1  # else zlib
COMPRESSED_START = (1 << 17) + 64  # bytes of zstd's first block and the headers before it, at most
#: LLVM's AMDGPUUsage: a processor, or a generic target of several; behind a colon are features, which the GPU's settings decide.
TARGET = re.compile(r"gfx\d{1,2}(?:-\d)?-generic|gfx[0-9a-f]{3,5}|amdgcnspirv")
UNKNOWN = "unknown"  # the architecture of a bundle that cannot be read here
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
MAX_ENTRIES = 100000  # and containers; PyTorch's largest library has 20,000. Compressed bundles take 0.7 ms each, and two of these at least
LONGEST_GAP = 4096  # bytes between two containers, which are aligned
LIBRARY = re.compile(r"\.so(\.[0-9.]+)?$")
KERNELS = re.compile(r"/(?:rocblas/library|\.kpack)/[^/]*[_-](%s)[^/]*$" % TARGET.pattern)
MAX_LIBRARIES = 5000
SCAN_S = 40.0  # what is left then is read by the next run
GPUS = "/proc/driver/nvidia/gpus/*/information"
AMD_GPUS = "/sys/class/kfd/kfd/topology/nodes/*/properties"
AMD_CLASSES, AMD_MEMORY = ("0x0302", "0x0380", "0x1200"), 8000 << 20  # as the catalogue tells GPUs from graphics of processors
SMI_S = 20.0  # without the persistence daemon it wakes every GPU first
CACHE = "gpu-code-3.json"  # the number is another where a library is read in another way
LARGEST_CACHE = 16 << 20  # bytes


class GpuCode(NamedTuple):
    """The GPU code of a library.

    ``machine_code``, ``ptx``: architecture → number of containers that have code for it. An architecture is a compute capability
    (``9.0``), with ``a`` for code of exactly that one, and ``f`` for code of its family, or a target of AMD (``gfx942``). A library whose
    kernels all have PTX of 9.0 has it in every one of its ``containers``.
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
    """(offset, size) of the first section with GPU code; None without one, or for another file than ELF of 64 bits."""
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
        if kind == 1 and SECTION.match(part(file, strings + name, 16)):
            return offset, length
    return None


def count(file: int, at: int, length: int) -> GpuCode:
    """Count the architectures of the containers in a section."""
    found = GpuCode(0, {}, {})
    left = MAX_ENTRIES
    for container in containers(file, at, at + length):
        in_container = set()
        for entry in itertools.chain([EMPTY], container):
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


def containers(file: int, at: int, end: int) -> Iterator[Iterable[Tuple[int, str]]]:
    """The containers of a section: (kind, architecture) of each entry."""
    start = at
    while at < end:
        magic = ANY_MAGIC.search(part(file, at, min(LONGEST_GAP + len(BUNDLE), end - at)))
        if magic is None:
            if at > start:
                return  # padding at the end
            raise Damaged("its section of GPU code has no container")
        at += magic.start()
        found: Iterable[Tuple[int, str]]
        if magic.group() == MAGIC:
            _version, header, size = CONTAINER.unpack(part(file, at, CONTAINER.size))
            size += header
            found = entries(file, at + header, at + size)
        elif magic.group() == BUNDLE:
            size, found = bundle(part(file, at, BUNDLE_HEADER))
        else:
            size, found = compressed_bundle(file, at, end)
        if not 0 < size <= end - at:
            raise Damaged("a container is larger than its section")
        yield found
        at += size


def bundle(header: bytes) -> Tuple[int, Set[Tuple[int, str]]]:
    """(size, entries) of an offload bundle, from its start."""
    (number,) = struct.unpack_from("<Q", header, len(BUNDLE))
    at, whole, found = len(BUNDLE) + 8, 0, set()
    for _ in range(number):
        offset, size, length = BUNDLE_ENTRY.unpack(header[at : at + BUNDLE_ENTRY.size])
        at += BUNDLE_ENTRY.size + length
        target = TARGET.search(header[at - length : at].decode(errors="replace"))
        if size and target:
            found.add((MACHINE_CODE, target.group()))
        whole = max(whole, at, offset + size)
    return whole, found


def compressed_bundle(file: int, at: int, end: int) -> Tuple[int, Set[Tuple[int, str]]]:
    """The same of a bundle that is compressed as a whole; UNKNOWN is its target where it cannot be read here, and of all to the section's end
    where it does not state its size, as version 1."""
    version, method = struct.unpack("<4xHH", part(file, at, 8))
    if version not in COMPRESSED_HEADER:
        return end - at, {(MACHINE_CODE, UNKNOWN)}
    form = COMPRESSED_HEADER[version]
    size = form.unpack(part(file, at, form.size))[0]
    packed = part(file, at + form.size, min(max(size - form.size, 0), COMPRESSED_START))
    try:
        header = unzstd(packed) if method == ZSTD else zlib.decompressobj().decompress(packed, BUNDLE_HEADER)
    except (zlib.error, OSError):
        header = b""
    return size, bundle(header)[1] if header.startswith(BUNDLE) else {(MACHINE_CODE, UNKNOWN)}


def unzstd(packed: bytes) -> bytes:
    """The start of what is compressed with zstd, by the library that package managers use: Python has none before 3.14. Raises OSError."""
    library = ctypes.CDLL("libzstd.so.1")
    library.ZSTD_createDStream.restype = ctypes.c_void_p
    stream = ctypes.c_void_p(library.ZSTD_createDStream())
    content, header = ctypes.create_string_buffer(packed), ctypes.create_string_buffer(BUNDLE_HEADER)
    buffer = ctypes.c_size_t * 3  # address, size, position
    source, out = buffer(ctypes.addressof(content), len(packed), 0), buffer(ctypes.addressof(header), BUNDLE_HEADER, 0)
    library.ZSTD_decompressStream(stream, out, source)  # after an error there is what came before it
    library.ZSTD_freeDStream(stream)
    return header.raw[: out[2]]


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
                if LIBRARY.search(name) or KERNELS.search(os.path.join(place, name)):
                    yield os.path.join(place, name)


def scan(known: Dict[str, Any], deadline: float) -> Tuple[Dict[str, Any], bool]:
    """(what there is to know of each library, whether there was time for all). ``known``: what an earlier scan has found."""
    found: Dict[str, Any] = {}
    for path in libraries():
        if len(found) >= MAX_LIBRARIES or time.monotonic() > deadline:
            return found, False
        kernels = KERNELS.search(path)
        if kernels:
            folder = found.setdefault(os.path.dirname(path), {"code": dict(GpuCode(0, {}, {})._asdict())})
            folder["code"]["machine_code"][kernels.group(1)] = 1
            continue
        try:
            status = os.stat(path)
            stamp = [status.st_size, status.st_mtime_ns]
            entry = known.get(path)
            if not (isinstance(entry, dict) and entry.get("stamp") == stamp and "code" in entry):
                code = read(path)
                is_final = code is None or UNKNOWN not in code.machine_code  # or a library may be installed that decompresses it
                entry = {"stamp": stamp if is_final else None, "code": dict(code._asdict()) if code else None}
        except (OSError, Damaged):
            continue  # what cannot be read cannot be loaded, and says so itself
        found[path] = entry
    return found, True


def gpus(kept: Any) -> Tuple[Any, List[Dict[str, str]]]:
    """(what tells these GPUs from others, the GPUs). ``kept``: the same of an earlier run: asking the driver takes seconds."""
    present = [[path, start_of(path)] for path in sorted(glob.glob(GPUS))]
    if present and isinstance(kept, list) and len(kept) == 2 and kept[0] == present and kept[1]:
        return kept[0], kept[1]
    command = ["nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, timeout=SMI_S)
    except (OSError, subprocess.SubprocessError):
        return present, []
    rows = [line.rpartition(",") for line in answer.stdout.decode(errors="replace").splitlines()]
    return present, [
        {"name": name.strip(), "architecture": capability.strip()}
        for name, _, capability in rows
        if re.match(r"\d+\.\d$", capability.strip())
    ]


def amd_gpus() -> List[Dict[str, str]]:
    """The GPUs that AMD's driver lists for computing, without graphics of processors."""
    found = []
    for path in sorted(glob.glob(AMD_GPUS)):
        known = {name: int(value) for name, value in re.findall(r"^(\w{1,40}) (\d{1,20})$", start_of(path), re.M)}
        version, place = known.get("gfx_target_version", 0), known.get("location_id", 0)
        device = "/sys/bus/pci/devices/%04x:%02x:%02x.0/" % (known.get("domain", 0), place >> 8 & 0xFF, place >> 3 & 0x1F)
        memory = start_of(device + "mem_info_vram_total").strip()
        if version and (start_of(device + "class")[:6] in AMD_CLASSES or memory.isdecimal() and int(memory) >= AMD_MEMORY):
            found.append({"name": "AMD GPU", "architecture": "gfx%d%x%x" % (version // 10000, version // 100 % 100, version % 100)})
    return found


def start_of(path: str) -> str:
    try:
        with open(path, errors="replace") as file:
            return file.read(4096)
    except OSError:
        return ""


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
    planned = [{"name": "GPU", "architecture": each} for each in sys.argv[1:]]
    identity, of_nvidia = (None, planned) if planned else gpus(kept.get("gpus"))
    present = of_nvidia + ([] if planned else amd_gpus())
    found, complete = scan(kept.get("libraries", {}), deadline) if present else ({}, True)
    if present:
        new = {"gpus": [identity, of_nvidia], "libraries": found}
        if new != kept:
            write_cache(cache, new)
    with_code = [dict(entry["code"], path=path) for path, entry in found.items() if entry["code"]]
    print(json.dumps({"gpus": present, "libraries": with_code, "complete": complete}))


if __name__ == "__main__":
    main()
