"""Candidates for NCCL on a host class: the builds that exist or can be made from source, and which constraint rejects each of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from provision.base.text import joined
from provision.base.versions import key, minor, package_key
from provision.catalog import Catalog
from provision.catalog.models import Nccl as NcclVersions
from provision.plan.model import Rejected, Repository
from provision.plan.requirements import Requirements
from provision.resolve.host_classes import TOOLKIT_PLACES, HostClass, nvidia_repository
from provision.survey.model import Toolkit

_FROM_SOURCE = "a build from source"
NOT_BUILT = ("source", "version")  # ids of what rejects builds from source as a whole
_ABSENT = "it does not exist"

NcclFrom = Literal["wheel", "repository", "local_repository", "source"]
SOURCES: tuple[NcclFrom, ...] = ("wheel", "repository", "local_repository", "source")  # in the order of preference

_LOCAL = re.compile(
    r"nccl-local-repo-(?P<system>[a-z]+\d+)-(?P<version>\d+\.\d+\.\d+)-cuda(?P<cuda>\d+\.\d+)_1\.0-1_(?P<arch>amd64|arm64)\.deb"
)


@dataclass(frozen=True)
class Build:
    """One version of NCCL, built for one CUDA, from one source.

    Attributes:
        package: the requested package; ``packages`` are the exact strings for the package manager.
        evidence: how it is known that it exists.
        weak: whether the evidence is weak.
        code: the compute capabilities that it has machine code for; empty if unknown.
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
        """As the user would request it."""
        return self.package if self.source == "repository" else f"{self.package} (CUDA {self.cuda})"


@dataclass(frozen=True)
class Candidates:
    """The builds for a host class, each with its rejection or None, and what is known not to exist."""

    builds: tuple[tuple[Build, Rejected | None], ...]
    unavailable: tuple[Rejected, ...]

    @cached_property
    def fitting(self) -> list[Build]:
        """The builds that the host class can use."""
        return [build for build, rejection in self.builds if rejection is None]

    @cached_property
    def versions(self) -> set[str]:
        """Their versions."""
        return {build.version for build in self.fitting}


@lru_cache(maxsize=256)  # to try a remedy, everything is resolved again with one host class or requirement changed
def candidates(host_class: HostClass, requirements: Requirements, build_cudas: tuple[str, ...]) -> Candidates:
    """All candidates for a host class.

    Builds for a newer CUDA than the driver's are among them where the driver runs these.

    Args:
        build_cudas: the CUDAs for which it can be built from source (see `build_cudas_of`).
    """
    installed = list(_installed(host_class))
    packages = {build.package for build in installed}  # better evidence than that of a repository
    repository = (each for each in _repository(host_class) if not (isinstance(each, Build) and each.package in packages))
    local = _local_repository(host_class, requirements)
    found = [*_wheels(host_class), *installed, *repository, *local, *_from_source(host_class, requirements, build_cudas)]
    builds = [each for each in found if isinstance(each, Build)]
    return Candidates(
        tuple((build, rejection(build, host_class, requirements)) for build in builds),
        tuple(each for each in found if isinstance(each, Rejected)),
    )


def rejection(build: Build, host_class: HostClass, requirements: Requirements) -> Rejected | None:
    """Why a host class cannot use this build; None if it can. The most informative reason comes first."""
    requested = build.version == requested_version(requirements)
    if wrong_driver := _newer_than_driver(build, host_class, requirements):
        return wrong_driver
    if not host_class.root and build.source not in ("wheel", "source"):
        return Rejected(build.name, "only root can install it, and root is unavailable there", id="privileges")
    if wrong_gpu := _unsupported_gpu(build.name, build.cuda, host_class) or _gpu_without_code(build, host_class):
        return wrong_gpu
    if not requirements.allow_downgrade and (older := downgrades(build.packages, host_class)):
        cause = f"{older[0][0]} {older[0][1]} is installed there, which is newer; --allow-downgrade replaces it"
        return Rejected(build.name, cause, id="installed")
    known_bad = requirements.catalog.known_bad("nccl", build.version)
    if known_bad and not (requested and requirements.allows_bad("nccl")):
        return Rejected(build.name, f"known bad: {known_bad[0]}", id="known bad")
    if requirements.nccl_version is not None and not requested:
        return Rejected(build.name, f"--nccl {requirements.nccl_version} was requested", id="version")
    if requirements.nccl_source not in ("auto", build.source):
        return Rejected(build.name, f"--nccl {requirements.nccl_local or requirements.nccl_source} was requested", id="source")
    covered = requirements.catalog.nccl().known_bad_covers
    if key(build.version) > key(covered) and not requested:
        cause = f"newer than the list of known bad releases ({covered}); --nccl {build.version} takes it"
        return Rejected(build.name, cause, id="too new")
    return None


def _newer_than_driver(build: Build, host_class: HostClass, requirements: Requirements) -> Rejected | None:
    """Whether the driver cannot run a build: one for a newer CUDA of its major runs by minor-version compatibility, without PTX."""
    if host_class.cuda is None or host_class.runs_natively(build.cuda):
        return None
    newer = f"newer than the driver's CUDA {host_class.cuda}"
    if not host_class.runs(build.cuda):
        return Rejected(build.name, newer, id="driver")
    if requirements.nccl_strict:
        return Rejected(build.name, f"{newer}: --nccl strict was requested", id="driver")
    if not host_class.capabilities or not build.code:
        return Rejected(build.name, f"{newer}, and not known to have machine code for the GPUs", id="driver")
    return None  # whether it has the code is another constraint


def requested_version(requirements: Requirements) -> str | None:
    """The version that the user requested, by itself or with a file."""
    local = local_repository(requirements.nccl_local) if requirements.nccl_local else None
    return requirements.nccl_version or requirements.nccl_tarball_version or (local.version if local else None)


def downgrades(packages: Iterable[str], host_class: HostClass) -> list[tuple[str, str, str]]:
    """(package, installed version, older version of a build's packages) of those that an earlier run did not install."""
    installed = dict(host_class.installed_nccl)
    wanted = {_name_of(host_class, package): package for package in packages}
    pairs = ((name, installed[name], package[len(name) + 1 :]) for name, package in wanted.items() if name in installed)
    return [(name, now, then) for name, now, then in pairs if package_key(then) < package_key(now)]


def _unsupported_gpu(candidate: str, cuda: str, host_class: HostClass) -> Rejected | None:
    """Whether a candidate for this CUDA supports the oldest and the newest GPU."""
    known = host_class.catalog.cuda()
    floor = known.gpu_floors.of.get(cuda.split(".")[0])
    if host_class.capabilities and floor and key(host_class.capabilities[0]) < key(floor):
        cause = f"its CUDA no longer has code for compute capability {host_class.capabilities[0]}"
        return Rejected(candidate, cause, f"from {floor} on", id="gpu")
    oldest = known.gpu_ceilings.of
    for capability in reversed(host_class.capabilities):
        named = max((each for each in oldest if key(each) <= key(capability)), key=key, default=None)
        if named and key(cuda) < key(oldest[named]):
            cause = f"its CUDA does not support compute capability {capability} yet"
            return Rejected(candidate, cause, f"{oldest[named]} or newer", id="gpu")
    return None


def _gpu_without_code(build: Build, host_class: HostClass) -> Rejected | None:
    """Whether NVIDIA's build has code for the GPUs that its CUDA supports: that depends on the release."""
    if build.code and (without := host_class.gpus_without_code(build.code)):
        lowest = build.code[0]
        has = f"from {lowest} on" if key(without[0]) < key(lowest) else f"only for {', '.join(build.code)}"
        return Rejected(build.name, f"it has no code for compute capability {without[0]}", has, id="gpu")
    if build.source in ("repository", "local_repository") and host_class.capabilities:
        floors = host_class.catalog.nccl().floors.of.get(build.cuda.split(".")[0], {})
        floor = max((floors[first] for first in floors if key(first) <= key(build.version)), key=key, default=None)
        if floor and key(host_class.capabilities[0]) < key(floor):
            cause = f"it has no code for compute capability {host_class.capabilities[0]}"
            return Rejected(build.name, cause, f"from {floor} on", id="gpu")
    return None


def _wheels(host_class: HostClass) -> Iterator[Build | Rejected]:
    wheels = host_class.catalog.nccl().wheels
    for package, versions in wheels.builds.items():
        first = wheels.aarch64_from.get(package)
        for version, cuda in versions.items():
            exact = f"{package}=={version}"
            libc = wheels.libc_from[max((each for each in wheels.libc_from if key(each) <= key(version)), key=key)]
            if host_class.lacks_libc(libc):
                yield Rejected(exact, f"it needs glibc {libc}, and there is {host_class.libc}", id="system")
            elif host_class.arch == "x86_64" or (first and key(version) >= key(first)):
                code = next(each.has for each in wheels.code if version in each.wheels.get(package, ()))
                yield Build(version, cuda, "wheel", exact, "the CUDA was read from the library in the wheel", code=code)
            else:
                yield Rejected(exact, f"the index has no wheel of it for {host_class.arch}", id="system")


def _installed(host_class: HostClass) -> Iterator[Build]:
    """NVIDIA's build that is installed, with or without its headers, whether or not a repository still offers it."""
    installed = dict(host_class.installed_nccl)
    version = installed.get(_package_names(host_class)[0], "")
    if set(installed.values()) == {version} and re.fullmatch(r"[^+]+\+cuda\d+\.\d+", version):
        packages = tuple(each for each in _pinned(host_class, version) if _name_of(host_class, each) in installed)
        yield _packaged(host_class, version, packages, "it is installed there")


def _repository(host_class: HostClass) -> Iterator[Build | Rejected]:
    """NVIDIA's repository. The host's own package index takes precedence over the catalogue."""
    names = _package_names(host_class)
    offered = [version for version in host_class.offered(names[0]) if "+cuda" in version]
    repository = nvidia_repository(host_class)
    configured = repository if isinstance(repository, Repository) else None
    for version in offered:
        pinned = _pinned(host_class, version)
        if all(version in dict(host_class.third_party_offers).get(name, ()) for name in names):
            yield _packaged(host_class, version, pinned, "a package repository that is configured on the host offers it")
        else:
            yield _packaged(host_class, version, pinned, "the host's own package index offers it", configured)
    if not offered and configured:
        yield from _catalogued(host_class, configured)
    elif isinstance(repository, Rejected) and not offered:
        yield repository


def _catalogued(host_class: HostClass, repository: Repository) -> Iterator[Build | Rejected]:
    """NVIDIA's packages according to the catalogue, whose evidence of a build is that of some system."""
    known, ranges, system = host_class.catalog.nccl(), host_class.catalog.cuda_repositories(), host_class.nvidia_system or ""
    first, last = ranges.first_cuda.of.get(system), ranges.last_cuda.of.get(system)
    absent = {
        f"{entry.version}+cuda{cuda}": entry.source
        for entry in known.absent
        for cuda in entry.cuda
        if system in (entry.systems or (system,))
    }
    for revision, by_cuda in known.repository.builds.items():
        for cuda, letter in by_cuda.items():
            version, evidence = f"{revision}+cuda{cuda}", known.evidence[letter]
            packages, source = _pinned(host_class, version), absent.pop(version, None)
            if source:
                yield Rejected(packages[0], _ABSENT, source, id="absent")
            elif last and key(cuda) > key(last):
                yield Rejected(packages[0], f"{system}'s repository ends with CUDA {last}", id="absent")
            elif first and key(cuda) < key(first):
                older = f"builds for other systems ({evidence.what}; {system}'s repository is certain from CUDA {first} on)"
                yield _packaged(host_class, version, packages, older, repository, weak=True)
            else:
                yield _packaged(host_class, version, packages, evidence.what, repository, weak=evidence.weak)
    for version, source in absent.items():  # people copy these from each other, though no such build was ever listed
        yield Rejected(_pinned(host_class, version)[0], _ABSENT, source, id="absent")


@dataclass(frozen=True)
class LocalRepository:
    """The parts of the name of a ``nccl-local-repo-*`` file; ``arch`` is Debian's name of the architecture."""

    system: str
    version: str
    cuda: str
    arch: str


def local_repository(name: str) -> LocalRepository | None:
    """The parts of the file's name; None if it is not one of NVIDIA's ``.deb``s, the only ones that can be installed."""
    found = _LOCAL.fullmatch(name)
    return LocalRepository(**found.groupdict()) if found else None


def _local_repository(host_class: HostClass, requirements: Requirements) -> Iterator[Build | Rejected]:
    file = requirements.nccl_local
    local = local_repository(file) if file else None
    arch = host_class.catalog.os().kernel_name(local.arch) if local else ""
    if file and local is None:
        yield Rejected(file, "its name is not that of one of NVIDIA's local repository packages", id="absent")
    elif file and local and (local.system, arch) != (host_class.nvidia_system, host_class.arch):
        system = host_class.nvidia_system or host_class.system
        yield Rejected(file, f"it is for {local.system} on {arch}, not for {system} on {host_class.arch}", id="system")
    elif file and local:
        packages = _pinned(host_class, f"{local.version}-1+cuda{local.cuda}")
        sha256 = requirements.nccl_local_sha256
        yield Build(local.version, local.cuda, "local_repository", file, "the given file", packages=packages, sha256=sha256)


def _packaged(
    host_class: HostClass, version: str, packages: tuple[str, ...], why: str, repository: Repository | None = None, *, weak: bool = False
) -> Build:
    revision, _, cuda = version.partition("+cuda")
    number = ".".join(map(str, key(revision)))
    code = _code_of_wheel(number, cuda, host_class.catalog)
    return Build(number, cuda, "repository", packages[0], why, weak, packages, repository, code=code)


def _code_of_wheel(version: str, cuda: str, catalog: Catalog) -> tuple[str, ...]:
    """The GPUs that the wheel of a release and CUDA has code for, which its packages are assumed to have, too; empty without one."""
    wheels, package = catalog.nccl().wheels, f"nvidia-nccl-cu{cuda.split('.')[0]}"
    if wheels.builds.get(package, {}).get(version) != cuda:
        return ()
    return next(each.has for each in wheels.code if version in each.wheels.get(package, ()))


def _package_names(host_class: HostClass) -> tuple[str, ...]:
    known = host_class.catalog.nccl().repository
    return known.rpm if host_class.family == "rhel" else known.apt


def _pinned(host_class: HostClass, version: str) -> tuple[str, ...]:
    """The exact strings for the package manager: ``libnccl2=2.21.5-1+cuda12.4`` or ``libnccl-2.21.5-1+cuda12.4``."""
    return tuple(f"{name}{'-' if host_class.family == 'rhel' else '='}{version}" for name in _package_names(host_class))


def _name_of(host_class: HostClass, package: str) -> str:
    return package.rsplit("-", 2)[0] if host_class.family == "rhel" else package.partition("=")[0]


def _from_source(host_class: HostClass, requirements: Requirements, build_cudas: tuple[str, ...]) -> Iterator[Build | Rejected]:
    """Builds of the given tarball, else of the releases whose tarball is known; only if requested."""
    known = requirements.catalog.nccl()
    if not build_cudas:
        yield Rejected(_FROM_SOURCE, _why_not_built(host_class), id="source")
    elif requirements.nccl_source != "source":
        yield Rejected(_FROM_SOURCE, "it takes long, and is built only on request: --nccl source", id="source")
    elif requirements.nccl_tarball and requirements.nccl_tarball_version:
        for cuda in build_cudas:
            sha256 = requirements.nccl_tarball_sha256
            yield _buildable(known, requirements.nccl_tarball_version, cuda, requirements.nccl_tarball, sha256, None)
    else:
        tarball = known.tarball
        for version, sha256 in tarball.sha256.items():
            for cuda in build_cudas:
                yield _buildable(known, version, cuda, f"nccl-{version}-1.tar.gz", sha256, tarball.url.format(version=version))
        if requirements.nccl_version and requirements.nccl_version not in tarball.sha256:
            available = ", ".join(tarball.sha256)
            reason = f"no checksum of the sources of NCCL {requirements.nccl_version} is known (there are those of {available})"
            yield Rejected(_FROM_SOURCE, reason, id="version")


def _buildable(known: NcclVersions, version: str, cuda: str, package: str, sha256: str | None, url: str | None) -> Build:
    """A build from source; the evidence is weak if NVIDIA has built releases of that series for other CUDA majors only."""
    cudas = [each for revision, by_cuda in known.repository.builds.items() if minor(revision) == minor(version) for each in by_cuda]
    wheels = [release for releases in known.wheels.builds.values() for release in releases.items()]
    cudas += [each for release, each in wheels if minor(release) == minor(version)]
    majors = sorted({key(each)[0] for each in cudas})
    weak = bool(majors) and key(cuda)[0] not in majors
    evidence = "the CUDA of the compiler there"
    if weak:
        evidence += f"; NVIDIA has built {minor(version)} for CUDA {' and '.join(f'{each}.x' for each in majors)} only"
    return Build(version, cuda, "source", package, evidence, weak, sha256=sha256, url=url)


def _why_not_built(host_class: HostClass) -> str:
    if host_class.toolkits is None:
        return "the facts do not say whether there is a CUDA compiler"
    elsewhere = f"nor can another host with {host_class.system} on {host_class.arch} build it"
    compilers = _compilers(host_class)
    found = ", ".join(f"that at {toolkit.path} is of {cuda}" for cuda, toolkit in compilers)
    if not compilers:
        return f"it needs a CUDA compiler, nvcc, and there is none (in {TOOLKIT_PLACES}); {elsewhere}"
    if all(key(cuda) > key(host_class.cuda or "0") for cuda, _toolkit in compilers):
        return f"its CUDA compiler is newer than the driver's CUDA {host_class.cuda}: {found}"
    if host_class.missing_build_tools:
        return f"it cannot be built without {joined(host_class.missing_build_tools)}, which only root could install; {elsewhere}"
    return f"no CUDA compiler of it fits driver and GPUs: {found}, the driver's CUDA is {host_class.cuda}"


def build_cudas_of(host_classes: Iterable[HostClass]) -> dict[HostClass, tuple[str, ...]]:
    """The CUDAs for which NCCL can be built for each host class: that of its own compiler, else those of hosts that share builds."""
    host_classes = list(host_classes)
    own = {host_class: compiler[0] for host_class in host_classes if (compiler := own_compiler(host_class))}
    return {
        each: (own[each],)
        if each in own
        else tuple(
            sorted({cuda for other, cuda in own.items() if other.build_platform == each.build_platform and _runs(each, cuda)}, key=key)
        )
        for each in host_classes
    }


def own_compiler(host_class: HostClass) -> tuple[str, Toolkit, str] | None:
    """(CUDA, toolkit, why) to build with on the host itself: the CUDA that an earlier run chose, else the largest that driver and GPUs
    support; of that CUDA the toolkit that was found first. None if it cannot build."""
    fitting = fitting_compilers(host_class)
    if not fitting or host_class.missing_build_tools:
        return None
    kept = {cuda for package, cuda in host_class.kept_builds if ".tar." in package}
    cuda, chosen = max(fitting, key=lambda each: (each[0] in kept, key(each[0])))
    best = "which an earlier run chose" if cuda in kept else "the largest that driver and GPUs support"
    return cuda, chosen, f"{chosen.found}, of CUDA {cuda}, {best}"


def _compilers(host_class: HostClass) -> list[tuple[str, Toolkit]]:
    """(CUDA, toolkit) of toolkits with a compiler, in the order in which they were found."""
    return [(minor(each.version), each) for each in host_class.toolkits or () if each.nvcc and each.version]


def fitting_compilers(host_class: HostClass) -> list[tuple[str, Toolkit]]:
    """(CUDA, toolkit) of its compilers for a CUDA that its driver and GPUs support."""
    return [(cuda, toolkit) for cuda, toolkit in _compilers(host_class) if _runs(host_class, cuda)]


def _runs(host_class: HostClass, cuda: str) -> bool:
    """Whether driver and GPUs run what is built for this CUDA."""
    return key(cuda) <= key(host_class.cuda or "0") and _unsupported_gpu("", cuda, host_class) is None


def make_arguments(sharing: Iterable[HostClass]) -> tuple[str, ...]:
    """Arguments of make: code for the GPUs of the hosts that share a build, and PTX of the newest for newer ones. None if the GPUs are not
    known: then make's default is code for all."""
    sharing = list(sharing)
    if not all(host_class.capabilities for host_class in sharing):
        return ()
    capabilities = sorted({each for host_class in sharing for each in host_class.capabilities}, key=key)
    numbers = [each.replace(".", "") for each in capabilities]
    code = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in numbers]
    return (" ".join([f"NVCC_GENCODE={code[0]}", *code[1:], f"-gencode=arch=compute_{numbers[-1]},code=compute_{numbers[-1]}"]),)
