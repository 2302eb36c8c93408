"""Which builds of NCCL there are for a kind of host: wheels, NVIDIA's repository, a local repository package, the distribution's own, and
what can be built of its sources.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from provision import catalog
from provision.base.versions import key, minor, package_key
from provision.catalog import architectures
from provision.plan.model import Rejected, Repository
from provision.plan.requirements import Requirements
from provision.resolve import toolkits
from provision.resolve.machine import Machine
from provision.resolve.repositories import repository

FROM_SOURCE = "a build from source"
_ABSENT = "it does not exist"
_READ_OUT = "the CUDA is read out of the library in the wheel"

NcclFrom = Literal["wheel", "repository", "local_repository", "distribution", "source"]
# In the order in which they are preferred, all else being equal.
SOURCES: tuple[NcclFrom, ...] = ("wheel", "repository", "local_repository", "distribution", "source")

_LOCAL = re.compile(
    r"nccl-local-repo-(?P<system>[a-z]+\d+)-(?P<version>\d+\.\d+\.\d+)-cuda(?P<cuda>\d+\.\d+)_1\.0-1_(?P<arch>amd64|arm64)\.deb"
)


@dataclass(frozen=True)
class Build:
    """One version of NCCL, built for one CUDA, from one place.

    Attributes:
        package: what is asked for; ``packages`` are the exact strings for the package manager.
        evidence: how it is known that it exists.
        weak: whether that is not much.
        code: the compute capabilities that it holds machine code for; empty where that is not known.
    """

    version: str
    cuda: str
    source: NcclFrom
    package: str
    evidence: str
    weak: bool = False
    packages: tuple[str, ...] = ()
    repository: Repository | None = None
    sha256: str | None = None
    url: str | None = None
    code: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """As the user would ask for it."""
        return self.package if self.source in ("repository", "distribution") else f"{self.package} (CUDA {self.cuda})"


@dataclass(frozen=True)
class LocalRepository:
    """What the name of a ``nccl-local-repo-*`` file says."""

    system: str
    version: str
    cuda: str
    arch: str


def local_repository(name: str) -> LocalRepository | None:
    """What the file's name says; None when it is none of NVIDIA's ``.deb``s, the only ones that can be installed."""
    found = _LOCAL.fullmatch(name)
    if not found:
        return None
    return LocalRepository(found["system"], found["version"], found["cuda"], architectures.kernel_name(found["arch"]))


@lru_cache(maxsize=256)
def builds(kind: Machine, requirements: Requirements, compilers: tuple[str, ...]) -> tuple[list[Build], list[Rejected], list[str]]:
    """(builds that exist for this kind of host, candidates that do not, where the host and the catalogue differ)

    Args:
        compilers: the CUDAs for which it can be built from its sources (see `nccl_sources.compilers`).
    """
    found: list[Build] = []
    lost: list[Rejected] = []
    differences: list[str] = []
    own = list(_installed(kind))
    there = {each.package for each in own}  # surer than where else the same may come from
    repository = (each for each in _repository(kind, differences) if not (isinstance(each, Build) and each.package in there))
    prebuilt = (*_wheels(kind), *own, *repository, *_local(kind, requirements), *_distribution(kind))
    for each in (*prebuilt, *_sources(kind, requirements, compilers)):
        if isinstance(each, Build):
            found.append(each)
        else:
            lost.append(each)
    return found, lost, differences


def _wheels(kind: Machine) -> Iterator[Build | Rejected]:
    """The wheels of the catalogue, whose CUDA is known."""
    wheels = catalog.nccl().wheels
    for package, versions in wheels.builds.items():
        first = wheels.aarch64_from.get(package)
        for version, cuda in versions.items():
            exact = f"{package}=={version}"
            if kind.arch == "x86_64" or (first and key(version) >= key(first)):
                code = next(each.has for each in wheels.code if version in each.wheels.get(package, ()))
                yield Build(version, cuda, "wheel", exact, _READ_OUT, code=tuple(code))
            else:
                yield Rejected(exact, f"the index has no wheel of it for {kind.arch}")


def _repository(kind: Machine, differences: list[str]) -> Iterator[Build | Rejected]:
    """NVIDIA's repository. What the host's own package index says wins over the catalogue."""
    known = catalog.nccl()
    names = _names(kind)
    offered = [version for version in kind.offered(names[0]) if "+cuda" in version]
    place = repository(kind)
    listed = dict(_catalogued(kind))
    if not offered and isinstance(place, str):
        yield Rejected("NVIDIA's package repository", place)
        return
    there = place if isinstance(place, Repository) else None
    for version in offered:
        revision, _, cuda = version.partition("+cuda")
        if all(kind.knows(name, version) for name in names):
            yield _package(kind, revision, cuda, None, "a package repository that the host knows already offers it")
        else:
            yield _package(kind, revision, cuda, there, "the host's own package index offers it")
    if offered:
        new = [version for version in offered if version not in listed]
        gone = [version for version, (known_by, absent) in listed.items() if known_by.proof and not absent and version not in offered]
        if new:
            differences.append(f"offers {names[0]} {', '.join(new)}, which the catalogue does not know")
        if gone:
            differences.append(f"does not offer {len(gone)} builds of {names[0]} that the catalogue lists: what the host says counts")
        return
    for version, (known_by, absent) in listed.items():
        revision, _, cuda = version.partition("+cuda")
        if not known_by.proof:
            yield Rejected(_strings(kind, version)[0], f"{known_by.what}: no proof that it exists")
        elif absent:
            yield Rejected(_strings(kind, version)[0], *absent)
        else:
            first = _first_cuda(kind)
            early = first is not None and key(cuda) < key(first)
            evidence = f"builds for other systems ({known_by.what}; {kind.repository}'s repository is sure from CUDA {first} on)"
            yield _package(kind, revision, cuda, there, evidence if early else known_by.what, weak=known_by.weak or early)
    for entry in known.absent:  # strings that people copy, though no such build was ever listed
        for cuda in entry.cuda:
            version = f"{entry.version}+cuda{cuda}"
            if version not in listed and kind.repository in (entry.systems or (kind.repository,)):
                yield Rejected(_strings(kind, version)[0], _ABSENT, entry.source)


def _installed(kind: Machine) -> Iterator[Build]:
    """NVIDIA's build that is installed there, whether or not a repository still offers it, and whether or not with its headers."""
    versions = {version for _name, version in kind.own_nccl}
    version = next(iter(versions), "")
    revision, _, cuda = version.partition("+cuda")
    if len(versions) == 1 and dict(kind.own_nccl).get(_names(kind)[0]) and re.fullmatch(r"\d+\.\d+", cuda):
        packages = tuple(string for string in _strings(kind, version) if _name_of(kind, string) in dict(kind.own_nccl))
        number = ".".join(map(str, key(revision)))
        yield Build(number, cuda, "repository", packages[0], "it is installed there", packages=packages)


def downgrades(build: Build, kind: Machine) -> list[tuple[str, str, str]]:
    """(package, the version that is there, the older one of the build) of packages that are not of ours."""
    there = dict(kind.own_nccl)
    wanted = {_name_of(kind, package): package for package in build.packages}
    pairs = ((name, there[name], package[len(name) + 1 :]) for name, package in wanted.items() if name in there)
    return [(name, now, then) for name, now, then in pairs if package_key(then) < package_key(now)]


def _name_of(kind: Machine, package: str) -> str:
    return package.rsplit("-", 2)[0] if kind.family == "rhel" else package.partition("=")[0]


def _catalogued(kind: Machine) -> Iterator[tuple[str, tuple[catalog.models.NcclEvidence, tuple[str, ...] | None]]]:
    """(version, (how it is known, why it is not there after all))"""
    known = catalog.nccl()
    absent = {
        f"{entry.version}+cuda{cuda}": (_ABSENT, entry.source)
        for entry in known.absent
        for cuda in entry.cuda
        if kind.repository in (entry.systems or (kind.repository,))
    }
    for revision, by_cuda in known.repository.builds.items():
        for cuda, letter in by_cuda.items():
            version = f"{revision}+cuda{cuda}"
            yield version, (known.evidence[letter], absent.get(version) or _too_late(kind, cuda))


def _too_late(kind: Machine, cuda: str) -> tuple[str] | None:
    """Why NVIDIA's repository for this system has nothing for this CUDA, where it was given up before."""
    last = catalog.cuda_repositories().last_cuda.systems.get(kind.repository or "")
    return (f"{kind.repository}'s repository ends with CUDA {last}",) if last and key(cuda) > key(last) else None


def _first_cuda(kind: Machine) -> str | None:
    """The oldest CUDA whose builds surely lie in NVIDIA's repository for this system: evidence of a build is of some system's."""
    first: str | None = catalog.cuda_repositories().first_cuda.systems.get(kind.repository or "")
    return first


def _local(kind: Machine, requirements: Requirements) -> Iterator[Build | Rejected]:
    if requirements.nccl_local is None:
        return
    said = local_repository(requirements.nccl_local)
    if said is None:
        yield Rejected(requirements.nccl_local, "its name is not that of one of NVIDIA's local repository packages")
    elif (said.system, said.arch) != (kind.repository, kind.arch):
        yield Rejected(
            requirements.nccl_local, f"it is for {said.system} on {said.arch}, not for {kind.repository or kind.system} on {kind.arch}"
        )
    else:
        yield Build(
            said.version,
            said.cuda,
            "local_repository",
            requirements.nccl_local,
            "the file that was given",
            packages=_strings(kind, f"{said.version}-1+cuda{said.cuda}"),
            sha256=requirements.nccl_local_sha256,
        )


def _distribution(kind: Machine) -> Iterator[Build | Rejected]:
    """The distribution's own package: without a CUDA in its name, so that only the catalogue can say what it was built for."""
    entry = catalog.nccl().distribution.builds.get(kind.repository or "")
    own = [version for version in kind.offered(_names(kind)[0]) if "+cuda" not in version]
    version = own[0] if own else entry.version if entry else None
    if version is None:
        return
    if entry is None or entry.cuda is None or key(entry.version) != key(version):
        yield Rejected(_strings(kind, version)[0], "the distribution's own; which CUDA it was built for is not known")
        return
    strings = _strings(kind, version)
    number = ".".join(map(str, key(version)))
    yield Build(number, entry.cuda, "distribution", strings[0], "the distribution's list of files", weak=True, packages=strings)


def _sources(kind: Machine, requirements: Requirements, compilers: tuple[str, ...]) -> Iterator[Build | Rejected]:
    """What can be built: the release of the tarball that was given, else those whose tarball is known. Only where it was asked for."""
    if not compilers:
        yield Rejected(FROM_SOURCE, without_compiler(kind))
    elif requirements.nccl_source != "source":
        yield Rejected(FROM_SOURCE, "it takes long, and is built only when asked for: --nccl-source source")
    elif requirements.nccl_tarball and requirements.nccl_tarball_version:
        for cuda in compilers:
            yield _buildable(requirements.nccl_tarball_version, cuda, requirements.nccl_tarball, sha256=requirements.nccl_tarball_sha256)
    else:
        known = catalog.nccl().tarball
        for version, checksum in known.sha256.items():
            url = known.url.format(version=version)
            for cuda in compilers:
                yield _buildable(version, cuda, f"nccl-{version}-1.tar.gz", sha256=checksum, url=url)
        if requirements.nccl_version and requirements.nccl_version not in known.sha256:
            yield Rejected(FROM_SOURCE, without_checksum(requirements.nccl_version))


def _buildable(version: str, cuda: str, name: str, *, sha256: str | None, url: str | None = None) -> Build:
    """A build that does not exist yet; weak where NVIDIA has built releases of that series for other CUDAs only."""
    majors = sorted({key(each)[0] for each in _cudas(version)})
    weak = bool(majors) and key(cuda)[0] not in majors
    evidence = "the CUDA of the compiler there"
    if weak:
        evidence += f"; NVIDIA has built {minor(version)} for CUDA {' and '.join(f'{each}.x' for each in majors)} only"
    return Build(version, cuda, "source", name, evidence, weak, sha256=sha256, url=url)


def _cudas(version: str) -> Iterator[str]:
    """The CUDAs for which prebuilt ones of this release's series are known."""
    known = catalog.nccl()
    for revision, by_cuda in known.repository.builds.items():
        if minor(revision) == minor(version):
            yield from by_cuda
    for wheels in known.wheels.builds.values():
        yield from (cuda for release, cuda in wheels.items() if minor(release) == minor(version))


def without_compiler(kind: Machine) -> str:
    """Why it cannot be built for this kind of host."""
    if kind.toolkits is None:
        return "the facts do not say whether there is a CUDA compiler"
    elsewhere = f"nor can another host with {kind.system} on {kind.arch} build it"
    found = [f"that at {toolkit.path} is of {cuda}" for cuda, toolkit in toolkits.compilers(kind)]
    if not found:
        return f"it needs a CUDA compiler, nvcc, and there is none (in {toolkits.LOOKED_AT}); {elsewhere}"
    newer = [cuda for cuda, _toolkit in toolkits.compilers(kind) if key(cuda) > key(kind.cuda or "0")]
    if len(newer) == len(found):
        return f"its CUDA compiler is newer than the driver's CUDA {kind.cuda}: {', '.join(found)}"
    if not kind.make:
        return f"it is built with make, which is not there, and only root could install it; {elsewhere}"
    return f"no CUDA compiler of it fits driver and GPUs: {', '.join(found)}, the driver's CUDA is {kind.cuda}"


def without_checksum(version: str) -> str:
    """Why a release cannot be fetched."""
    there = ", ".join(catalog.nccl().tarball.sha256)
    return f"no checksum of the sources of NCCL {version} is known (there are those of {there})"


def _package(kind: Machine, revision: str, cuda: str, place: Repository | None, evidence: str, *, weak: bool = False) -> Build:
    strings = _strings(kind, f"{revision}+cuda{cuda}")
    number = ".".join(map(str, key(revision)))
    return Build(number, cuda, "repository", strings[0], evidence, weak, strings, place)


def _names(kind: Machine) -> tuple[str, ...]:
    known = catalog.nccl().repository
    return known.rpm if kind.family == "rhel" else known.apt


def _strings(kind: Machine, version: str) -> tuple[str, ...]:
    """What the package manager is asked for, exactly: ``libnccl2=2.21.5-1+cuda12.4`` or ``libnccl-2.21.5-1+cuda12.4``."""
    return tuple(f"{name}{'-' if kind.family == 'rhel' else '='}{version}" for name in _names(kind))
