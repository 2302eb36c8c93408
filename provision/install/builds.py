"""Cache of what was built on hosts, on the controller: once per distribution and architecture.

A build is named by everything that it depends on. Its checksum is in a file next to it; a build that does not match is ignored. Those of a
bundle (``bundled``: its supplies) go before those of the cache, and are not kept: who made the bundle decides about its hosts alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from provision.base import downloads, paths
from provision.base.errors import ProvisionError

NOTE = ".sha256"


@dataclass(frozen=True)
class Kind:
    """A kind of build: the name of its folder, and the suffix of its files."""

    name: str
    ending: str


OPENMPI = Kind("openmpi", ".tar.gz")
NCCL = Kind("nccl", ".tar.gz")
ENGINE = Kind("engine", ".whl")


class Build(TypedDict, total=False):
    """A build: the hosts that share it, of which the first builds, or of ``builders``; its checksum, empty where none is cached."""

    hosts: list[str]
    sha256: str
    builders: list[str]


class Shares(TypedDict):
    """Host → the key of its build, each build by its key, and the folder for them on the controller."""

    folder: str
    build_of: dict[str, str]
    builds: dict[str, Build]


def key_of(name: str, system: str, arch: str, depends: Sequence[object]) -> str:
    """Names a build by everything that it depends on: hosts with the same key get the same bits. ``name``: with the version."""
    digest = hashlib.sha256(json.dumps([system, arch, *depends]).encode()).hexdigest()
    return f"{name}-{system.replace(' ', '')}-{arch}-{digest[:12]}"


def cached(kind: Kind, key: str, bundled: Path | None = None) -> str | None:
    """The checksum of a cached build; None where there is none, or a damaged one."""
    file = files(kind, key, bundled)[0]
    try:
        expected = _noted(file)
        if downloads.digest(file) == expected:
            return expected
        file.unlink()
    except OSError:
        return None
    return None


def files(kind: Kind, key: str, bundled: Path | None = None) -> list[Path]:
    """The files of a cached build: itself and its checksum."""
    name = f"{key}{kind.ending}"
    file = _cache(kind) / name
    if bundled is not None and (bundled / kind.name / (name + NOTE)).exists():
        file = bundled / kind.name / name
    return [file, file.with_name(file.name + NOTE)]


def shares(kind: Kind, keys: Mapping[str, str], builders: Sequence[str], folder: Path, bundled: Path | None = None) -> Shares:
    """Which build each host of ``keys`` gets; hosts that share one are in the order of ``builders``."""
    made: dict[str, Build] = {}
    for name in builders:
        key = keys[name]
        if key not in made:
            made[key] = {"hosts": [], "sha256": cached(kind, key, bundled) or ""}
        made[key]["hosts"].append(name)
    return {"folder": str(folder), "build_of": dict(keys), "builds": made}


def adopt(folder: Path) -> None:
    """Cache the complete builds that a run left in ``folder``."""
    for kind in (OPENMPI, NCCL, ENGINE):
        for file in sorted((folder / kind.name).glob(f"*{kind.ending}")):
            note, kept = file.with_name(file.name + NOTE), _cache(kind) / file.name
            if kept.exists() or not note.exists() or downloads.digest(file) != _noted(file):
                continue
            keep(kind, file.name.removesuffix(kind.ending), file.read_bytes())


def keep(kind: Kind, key: str, content: bytes) -> None:
    """Cache a build. Raises ProvisionError where that fails, as on a full disk."""
    file = _cache(kind) / f"{key}{kind.ending}"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        downloads.remove_leftovers(file.parent)
        downloads.store(file.with_name(file.name + NOTE), f"{hashlib.sha256(content).hexdigest()}\n".encode())
        downloads.store(file, content)
    except OSError as error:
        raise ProvisionError(f"cannot keep the build {file.name}: {error}", where=str(file.parent), hint="free it") from error


def _noted(file: Path) -> str:
    return file.with_name(file.name + NOTE).read_text(encoding="ascii").strip()


def _cache(kind: Kind) -> Path:
    return paths.cache() / kind.name
