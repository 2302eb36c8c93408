"""Libraries of NCCL, MPI and hwloc, the dynamic linker's view of them, and build tools."""

import json
import os
import re
import sys

from .machine import in_parallel, once, program_in, section

LIBRARIES_OF_INTEREST = re.compile(
    r"^lib(mpi|open-pal|open-rte|prrte|pmix|nccl|nccl-net|hwloc|event_core|cudart|cuda|nvidia-ml|ibverbs|fabric|ucp)\.so"
)


@once
def ldconfig_entries(machine):
    """[(soname, path)] of the loader's cache, in its order: the first one wins."""
    _, output, _ = machine.run(["ldconfig", "-p"])
    entries = []
    for line in output.splitlines():
        match = re.match(r"\s+(\S+) \((.*)\) => (\S+)", line)
        if match and LIBRARIES_OF_INTEREST.match(match.group(1)):
            entries.append((match.group(1), match.group(3)))
    return entries


# The CUDA of a build is in its banner; the file is mapped, not read whole.
NCCL_PROBE = """
import ctypes, json, mmap, re, sys
out = {"version": None, "cuda": None, "error": None}
try:
    library = ctypes.CDLL(sys.argv[1])
    n = ctypes.c_int()
    if library.ncclGetVersion(ctypes.byref(n)) == 0:
        v = n.value
        out["version"] = "%d.%d.%d" % ((v // 10000, v % 10000 // 100, v % 100) if v >= 10000 else (v // 1000, v % 1000 // 100, v % 100))
except (OSError, AttributeError) as error:
    out["error"] = str(error)
with open(sys.argv[1], "rb") as file:
    banner = re.search(rb"NCCL version (\\d+\\.\\d+\\.\\d+)[^\\0+]*\\+cuda(\\d+\\.\\d+)", mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
if banner:
    out["version"] = out["version"] or banner.group(1).decode()
    out["cuda"] = banner.group(2).decode()
print(json.dumps(out))
"""


def probe_nccl(machine, path):
    status, output, complaint = machine.run([sys.executable, "-c", NCCL_PROBE, path])
    try:
        answer = json.loads(output)
    except ValueError:
        answer = {"version": None, "cuda": None, "error": complaint.strip()[-300:] or "exit status %s" % status}
    return dict(answer, path=path)


def distinct_files(paths):
    """Paths without links to a file that is already listed."""
    seen, kept = set(), []
    for path in paths:
        real = os.path.realpath(path)
        if real not in seen and os.path.exists(real):
            seen.add(real)
            kept.append(path)
    return kept


@section("nccl")
def nccl(machine):
    cached = [path for name, path in ldconfig_entries(machine) if name.startswith("libnccl.so")]
    places = [
        "/usr/lib/*-linux-gnu",
        "/usr/lib64",
        "/usr/local/lib",
        "/usr/local/lib64",
        "/usr/local/cuda*/lib64",
        "/usr/local/nccl*/lib",
        "/opt/nccl*/lib",
    ]
    places += [machine.prefix + "/lib", machine.prefix + "/nccl*/lib", machine.venv + "/lib/python3*/site-packages/nvidia/nccl/lib"]
    found = [path for place in places for path in machine.glob(place + "/libnccl.so*")]
    libraries = distinct_files(cached + found)[:12]
    answers = in_parallel(*[lambda path=path: probe_nccl(machine, path) for path in libraries])
    return {"libraries": [answer for answer in answers if answer]}


def read_mpi_version(text):
    """(flavour, version) from `mpirun --version`."""
    for flavour, pattern in (
        ("openmpi", r"\(Open MPI\) (\d[\w.]*)"),
        ("openmpi", r"Open MPI\) v?(\d[\w.]*)"),
        ("intel", r"Intel\(R\) MPI Library.*?Version (\S+)"),
        ("mpich", r"HYDRA build details:.*?Version:\s+(\S+)"),
        ("prrte", r"PRRTE[^\d]*(\d[\w.]*)"),
    ):
        match = re.search(pattern, text, re.S)
        if match:
            return flavour, match.group(1)
    return "unknown", None


def probe_mpirun(machine, path):
    status, output, complaint = machine.run([path, "--version"])
    flavour, version = read_mpi_version(output + complaint)
    return {
        "path": path,
        "flavour": flavour,
        "version": version,
        "error": None if version else (complaint or output).strip()[-300:],
    }


@section("mpi")
def mpi(machine):
    on_path = [os.path.join(folder, "mpirun") for folder in machine.env.get("PATH", "").split(":") if folder]
    usual = ["/usr/bin", "/usr/local/bin", machine.prefix + "/bin", machine.prefix + "/*/bin", machine.venv + "/bin"]
    usual += ["/usr/lib64/*mpi*/bin", "/opt/*mpi*/bin", "/opt/*/*mpi*/bin", "/usr/local/*mpi*/bin"]
    elsewhere = [path for folder in usual for path in machine.glob(folder + "/mpirun")]
    paths = distinct_files([path for path in on_path + elsewhere if os.access(path, os.X_OK)])[:12]
    answers = in_parallel(*[lambda path=path: probe_mpirun(machine, path) for path in paths])
    found = [dict(answer, on_path=path in on_path) for path, answer in zip(paths, answers) if answer]
    path = machine.env.get("PATH", "")
    return {"found": found, "first": program_in(path, "mpirun"), "orted": program_in(path, "orted")}


@section("hwloc")
def hwloc(machine):
    cached = [path for name, path in ldconfig_entries(machine) if name.startswith("libhwloc.so")]
    paths = distinct_files(cached + machine.glob("/usr/local/lib*/libhwloc.so.*"))
    return {"libraries": [{"path": path, "file": os.path.basename(os.path.realpath(path))} for path in paths]}


@section("linker")
def linker(machine):
    cache = {}
    for name, path in ldconfig_entries(machine):
        cache.setdefault(name, []).append(path)
    return {"cache": cache}


def tool_version(machine, command, pattern):
    path = machine.which(command[0])
    if path is None:
        return None
    _, output, complaint = machine.run(command)
    said = re.search(pattern, output + complaint)
    return {"path": path, "version": said.group(1) if said else None}


@section(None)
def toolchain(machine):
    dotted = r"(\d+\.\d+[\w.]*|\d+)"
    wanted = (
        ("cmake", ["cmake", "--version"], r"version " + dotted),
        ("compiler", ["g++", "-dumpfullversion", "-dumpversion"], dotted),
        ("make", ["make", "--version"], r"Make " + dotted),
    )
    answers = in_parallel(
        *[lambda command=command, pattern=pattern: tool_version(machine, command, pattern) for _, command, pattern in wanted]
    )
    return {name: answer for (name, _, _), answer in zip(wanted, answers)}
