"""What a wheel of NCCL or PyTorch tells: its CUDA, the GPUs that it has code for, and the NCCL that PyTorch requires."""

from __future__ import annotations

import contextlib
import itertools
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import Version

from provision.base.downloads import Unavailable
from provision.base.versions import key
from provision.catalog.update.archive import DAMAGED, opened_wheel, text_of, unpacked
from provision.catalog.update.package_index import Wheel
from provision.catalog.update.sources import Sources, Update, sentence
from provision.hostside import gpu_code

NCCL_LIBRARY = "nvidia/nccl/lib/libnccl.so.2"
TORCH_LIBRARY = "torch/lib/libtorch_cuda.so"
_NCCL_TEXT = re.compile(rb"NCCL version (\d+\.\d+\.\d+)[^\0+]{0,40}\+cuda(\d+\.\d+)")
_TORCH_CUDA = re.compile(r"^cuda\b[^=\n]*= '(\d+\.\d+)'$", re.M)
_BLOCK = 1 << 22  # bytes of a library that are searched at once
_NOT_SEEN = "read from the wheels of a package index; that PyTorch's own index has this build was not seen"


def add_release(made: Update, package: str, wheels: list[Wheel], sources: Sources, say: Callable[[str], None]) -> None:
    """Add the row of a release; what cannot be read of it is said, and nothing of it added."""
    try:
        if package == "torch":
            _add_torch(made, wheels, sources, say)
        else:
            _add_nccl(made, package, wheels, sources, say)
    except (Unavailable, OSError, *DAMAGED, gpu_code.Damaged) as error:
        made.unreached.append(f"{package} {wheels[0].version}: {sentence(error)}")


def _add_nccl(made: Update, package: str, wheels: list[Wheel], sources: Sources, say: Callable[[str], None]) -> None:
    wheel = min(wheels, key=lambda each: each.arch != "x86_64")
    say(f"reading {wheel.name}")
    with opened_wheel(wheel, sources) as archive, unpacked(archive, NCCL_LIBRARY) as path:
        cuda, code = nccl_of(path)
    rows = made.rows.setdefault("nccl", {}).setdefault("wheels", {"builds": {}, "code": []})
    rows["builds"].setdefault(package, {})[wheel.version] = cuda
    rows["code"].append({"has": code, "wheels": {package: [wheel.version]}})
    made.found.append(f"{package} {wheel.version}: CUDA {cuda}, code for {', '.join(code)}")


def nccl_of(path: Path) -> tuple[str, list[str]]:
    """(CUDA, compute capabilities) of an NCCL library. Raises Unavailable for another file."""
    code = gpu_code.read(str(path))
    found = _searched(path, _NCCL_TEXT)
    if code is None or found is None:
        raise Unavailable(f"{NCCL_LIBRARY} is not an NCCL with GPU code")
    return found[2].decode(), _capabilities(code)


def _searched(path: Path, pattern: re.Pattern[bytes]) -> re.Match[bytes] | None:
    """The first match in a large file; of one that crosses a border of blocks, too."""
    with path.open("rb") as file:
        before = b""
        while block := file.read(_BLOCK):
            if found := pattern.search(before + block):
                return found
            before = block[-256:]
    return None


def _capabilities(code: gpu_code.GpuCode) -> list[str]:
    """The compute capabilities of machine code for all kernels, lowest first; the newest with +PTX where all have its PTX.

    Kernels for one GPU or family alone (``9.0a``) are in containers of their own, which do not count.

    Raises:
        Unavailable: there is none.
    """
    most = max(code.machine_code.values(), default=0)
    plain = sorted((each for each, count in code.machine_code.items() if each[-1].isdigit() and count == most), key=key)
    if not plain:
        raise Unavailable("its library has no machine code for all GPUs of a compute capability")
    if code.ptx.get(plain[-1], 0) >= most:
        plain[-1] += "+PTX"
    return plain


def _add_torch(made: Update, wheels: list[Wheel], sources: Sources, say: Callable[[str], None]) -> None:
    """A build for each CUDA: an index as PyTorch's has several of a release, and some without CUDA."""
    version, builds, pythons = wheels[0].version, dict[str, dict[str, Any]](), set[str]()
    for build, arch in itertools.product(dict.fromkeys(each.build for each in wheels), sources.catalog.os().architectures):
        of_build = [each for each in wheels if (each.build, each.arch) == (build, arch)]
        if of_build and (read := _torch_of(of_build[0], sources, say)):
            cuda, nccl, code = read
            row = builds.setdefault(cuda, {"nccl": nccl, "code": {}, "weak": _NOT_SEEN})
            row["nccl"] = row["nccl"] or nccl
            row["code"].setdefault(arch, code)
            pythons |= {f"3.{each.python[3:]}" for each in of_build if re.fullmatch(r"cp3\d+", each.python)}
    if not builds:
        raise Unavailable("its wheels have no CUDA")
    if not pythons:
        raise Unavailable("it has wheels for no release of Python")
    row = {"pythons": sorted(pythons, key=key), "builds": builds}
    made.rows.setdefault("pytorch", {}).setdefault("releases", {})[version] = row
    for cuda, build_row in builds.items():
        listed = "; ".join(f"{arch}: {', '.join(has)}" for arch, has in build_row["code"].items())
        of = f"Python {row['pythons'][0]} to {row['pythons'][-1]}"
        made.found.append(f"torch {version}: CUDA {cuda}, NCCL {build_row['nccl'] or 'of its own'}, {of}, code for {listed}")


def _torch_of(wheel: Wheel, sources: Sources, say: Callable[[str], None]) -> tuple[str, str | None, list[str]] | None:
    """(CUDA, the NCCL that it pins, compute capabilities) of a wheel; None for a build without CUDA."""
    say(f"reading {wheel.name}")
    with opened_wheel(wheel, sources) as archive:
        cuda = _TORCH_CUDA.search(text_of(archive, "torch/version.py"))
        if cuda is None:
            return None
        with unpacked(archive, TORCH_LIBRARY) as path:
            code = gpu_code.read(str(path))
        if code is None:
            raise Unavailable(f"{TORCH_LIBRARY} has no GPU code")
        return cuda[1], _nccl_required(archive), _capabilities(code)


def _nccl_required(archive: zipfile.ZipFile) -> str | None:
    """The NCCL that a wheel's metadata pins."""
    name = next((each for each in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", each)), None)
    for line in text_of(archive, name).splitlines() if name else ():
        if line.startswith("Requires-Dist: nvidia-nccl-cu"):
            with contextlib.suppress(InvalidRequirement):
                pins = [each.version for each in Requirement(line.partition(": ")[2]).specifier if each.operator == "=="]
                if pins and re.fullmatch(r"\d+(\.\d+)+", pins[0]):
                    return Version(pins[0]).base_version
    return None
