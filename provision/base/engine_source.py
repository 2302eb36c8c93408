"""Source archives of the engine and of its Horovod names, for the hosts.

The same sources give the same bytes, so that an archive's checksum says whether a host must build.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import re
import tarfile
from dataclasses import dataclass, replace
from pathlib import Path

from provision.base import resources

_LEFT_OUT = {"BUILD", "build", "dist", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", "tests"}


@dataclass(frozen=True)
class EngineSource:
    """An archive: its content, version, SHA-256, and the name of its package.

    ``build``: names what the archive holds, however it is compressed; it is the build tag of wheels that `make dist` makes of it.
    ``wheels``: these wheels, as far as they are here.
    """

    content: bytes
    version: str
    sha256: str
    package: str = "collective_core"
    build: str = ""
    wheels: tuple[Path, ...] = ()

    def with_wheels(self, folder: Path | None) -> EngineSource:
        """The same with the wheels in ``folder`` that were built from these sources, before those that it has."""
        found = sorted(folder.glob(f"{self.package}-{self.version}-{self.build}-py3-none-manylinux*.whl")) if folder else []
        return replace(self, wheels=(*found, *self.wheels))

    def save(self, folder: Path) -> Path:
        """Write the archive into ``folder`` and return its path."""
        path = folder / f"{self.package}-{self.version}.tar.gz"
        path.write_bytes(self.content)
        return path


def pack() -> EngineSource:
    """Pack the engine's sources of this installation, with the wheels that came with it."""
    root = resources.folder("collective_core")
    return _packed(root, "collective_core", root / "src/collective_core/version.py").with_wheels(resources.ENGINE_WHEELS)


def pack_horovod_names() -> EngineSource:
    """Pack the sources of the package ``horovod``, which maps Horovod's names to the engine."""
    root = resources.folder("collective_core") / "horovod"
    return _packed(root, "collective_core_horovod", root / "pyproject.toml")


def _packed(root: Path, package: str, versioned: Path) -> EngineSource:
    """``versioned``: the file with the package's version."""
    version = re.search(r'^(?:version|__version__) = "([^"]+)"', versioned.read_text(encoding="utf-8"), re.MULTILINE)
    if version is None:
        raise ValueError(f"{versioned} has no version")
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in sorted(root.rglob("*")):
            inner = path.relative_to(root)
            if inner.parts[0] == "horovod":
                continue  # a package of its own
            if path.is_file() and not _LEFT_OUT.intersection(inner.parts) and not any(part.endswith(".egg-info") for part in inner.parts):
                info = tarfile.TarInfo(f"{package}-{version.group(1)}/{inner.as_posix()}")
                content = path.read_bytes()
                info.size, info.mode, info.mtime = len(content), 0o644, 0
                archive.addfile(info, io.BytesIO(content))
    packed = io.BytesIO()
    with gzip.GzipFile(filename="", fileobj=packed, mode="wb", compresslevel=6, mtime=0) as stream:
        stream.write(raw.getvalue())
    content, build = packed.getvalue(), f"0_{hashlib.sha256(raw.getvalue()).hexdigest()[:16]}"
    return EngineSource(content, version.group(1), hashlib.sha256(content).hexdigest(), package, build)
