"""NCCL: ONE version for all hosts, since different versions cannot communicate; per host its build for the largest CUDA that fits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from provision.base.text import joined
from provision.base.versions import key
from provision.catalog import Catalog, troubles
from provision.plan.model import Builder, Nccl, Rejected, SourceBuild, SystemPackages, Wheel
from provision.plan.requirements import Requirements
from provision.resolve.host_classes import HostClass, HostClasses, builders, describe_toolkits
from provision.resolve.nccl_builds import (
    NOT_BUILT,
    SOURCES,
    Build,
    Candidates,
    build_cudas_of,
    candidates,
    downgrades,
    fitting_compilers,
    make_arguments,
    own_compiler,
    requested_version,
)
from provision.resolve.remedies import Conflict, ConflictId, Proposal, change_classes, change_requirements, exclude, kept_bad, newer_drivers
from provision.survey.model import Toolkit

_FIELDS = ("nccl_version", "nccl_local", "nccl_tarball", "nccl_tarball_version")
_NOT_REQUESTED: dict[str, Any] = {"nccl_source": "auto", **dict.fromkeys(_FIELDS)}


def nccl(all_host_classes: HostClasses, requirements: Requirements) -> tuple[dict[HostClass, Nccl], list[str]]:
    """(NCCL for every host class with a GPU and a driver, notes)

    Raises:
        Conflict: no version fits all of them, or one is requested and there are hosts with GPUs of AMD.
    """
    host_classes = {host_class: names for host_class, names in all_host_classes.items() if host_class.cuda is not None}
    values = _requested(requirements)
    if not host_classes:
        return {}, [f"--nccl {value} has no effect: none of these hosts has an NVIDIA GPU that is used" for value in values]
    if values and (of_amd := sorted(name for host_class, names in all_host_classes.items() if host_class.targets for name in names)):
        what = f"--nccl {' '.join(values)}: NCCL connects NVIDIA's GPUs only, and there are AMD's: {joined(of_amd)}"
        text = "leave --nccl out: without it gradients between the vendors go through host memory"
        raise Conflict("nccl-vendor", of_amd[0], what, (change_requirements(text, **_NOT_REQUESTED), exclude(of_amd)))
    build_cudas = build_cudas_of(host_classes)
    found = {host_class: candidates(host_class, requirements, build_cudas[host_class]) for host_class in host_classes}
    builds = _choose(found, requirements.catalog)
    if builds is None:
        raise _conflict(host_classes, found, requirements)
    choice = _Choice(host_classes, requirements, found, builds)
    notes = kept_bad("nccl", f"NCCL {choice.version}", requirements.catalog.known_bad("nccl", choice.version), requirements)
    notes += [
        f"{joined(names)}: {package} {now} is replaced by the older {then} (--allow-downgrade)"
        for host_class, names in host_classes.items()
        for package, now, then in downgrades(builds[host_class].packages, host_class)
    ]
    return {host_class: choice.component(host_class) for host_class in host_classes}, notes


def _requested(requirements: Requirements) -> list[str]:
    """The values of --nccl; those from a lock are not the user's."""
    if "nccl" in requirements.kept:
        return []
    values: list[str | None] = [requirements.nccl_version, requirements.nccl_local, requirements.nccl_tarball]
    if not any(values) and requirements.nccl_source != "auto":
        values = [requirements.nccl_source]
    return [value for value in values if value]


def _choose(found: Mapping[HostClass, Candidates], catalog: Catalog) -> dict[HostClass, Build] | None:
    """For every host class a build of the best version that all can have.

    Best is: builds that are known to exist; on most host classes for the driver's CUDA major; the fewest known problems that a newer
    release has fixed; the preferred source; the newest.
    """
    majors = {host_class: max((key(build.cuda)[0] for build in each.fitting), default=0) for host_class, each in found.items()}
    choices = [
        {host_class: _best(host_class, version, each.fitting) for host_class, each in found.items()}
        for version in sorted(_common_versions(found.values()), key=key, reverse=True)
    ]

    def cost(builds: Mapping[HostClass, Build]) -> tuple[bool, int, int, int]:
        return (
            any(build.weak for build in builds.values()),
            sum(key(build.cuda)[0] < majors[host_class] for host_class, build in builds.items()),
            len(troubles(next(iter(builds.values())).version, catalog.nccl().known_weak)),
            max(SOURCES.index(build.source) for build in builds.values()),
        )

    return min(choices, key=cost, default=None)


def _common_versions(candidates: Iterable[Candidates]) -> set[str]:
    """The versions that all host classes can have."""
    return set.intersection(*(each.versions for each in candidates))


def _best(host_class: HostClass, version: str, builds: list[Build]) -> Build:
    """Of the builds of a version the one that an earlier run chose, else of the largest CUDA major that for the largest CUDA that the
    driver runs natively, else by minor-version compatibility, with the best evidence."""

    def cost(build: Build) -> tuple[bool, tuple[int, bool, tuple[int, ...]], bool, int]:
        by_cuda = (-key(build.cuda)[0], not host_class.runs_natively(build.cuda), tuple(-part for part in key(build.cuda)))
        return not _kept(build, host_class), by_cuda, build.weak, SOURCES.index(build.source)

    return min((build for build in builds if build.version == version), key=cost)


def _kept(build: Build, host_class: HostClass) -> bool:
    return (build.package, build.cuda) in host_class.kept_builds


@dataclass(frozen=True)
class _Choice:
    """The chosen build of every host class with GPUs, and what it was chosen from."""

    host_classes: HostClasses
    requirements: Requirements
    candidates: Mapping[HostClass, Candidates]
    builds: Mapping[HostClass, Build]

    @property
    def version(self) -> str:
        """The same for all."""
        return next(iter(self.builds.values())).version

    def component(self, host_class: HostClass) -> Nccl:
        """The build as a component of the plan, with its reasons and what was rejected."""
        build = self.builds[host_class]
        why = [host_class.cuda_why, f"{self.version} is the one version for all hosts with GPUs"]
        if host_class.capabilities:
            why.append(f"the lowest compute capability is {host_class.capabilities[0]}")
        sharing: HostClasses = {}
        able: tuple[Builder, ...] = ()
        if build.source == "source":
            sharing = {
                other: names
                for other, names in self.host_classes.items()
                if other.build_platform == host_class.build_platform and self.builds[other] == build
            }
            able = builders(sharing, lambda other: _toolkit_of(other, build.cuda))
            why += self._why_built(host_class, build, sharing, able)
        else:
            best = "was chosen by an earlier run" if _kept(build, host_class) else "is the largest of it that fits"
            why.append(f"the build for CUDA {build.cuda} {best} ({build.evidence})")
            if not host_class.runs_natively(build.cuda):
                driver, major = host_class.driver or f"for CUDA {host_class.cuda}", build.cuda.split(".")[0]
                why.append(
                    f"by minor-version compatibility: driver {driver} runs machine code for any CUDA {major}.x, and the build has it for "
                    f"compute capability {', '.join(host_class.capabilities)}; --nccl strict keeps to CUDA {host_class.cuda}"
                )
            if build.weak:
                why.append("weak evidence: it may not exist; the host's package index decides")
        everywhere = [each for each in host_class.catalog.nccl().known_weak if not each.when]  # of the others a note tells, where they hold
        why += [f"known problem, fixed only in newer ones: {problem}" for problem in troubles(self.version, everywhere)]
        cause = "an earlier run chose it" if "nccl" in self.requirements.kept else "of --allow-bad"
        why += [f"known bad, taken because {cause}: {problem}" for problem in self.requirements.catalog.known_bad("nccl", self.version)]
        rejected = tuple(self._rejected(host_class))
        common = (build.version, build.package)
        if build.source == "source":
            arguments = make_arguments(sharing)
            return SourceBuild(*common, "source", tuple(why), rejected, build.url, build.sha256, build.cuda, arguments, able)
        if build.source == "wheel":
            return Wheel(*common, "wheel", tuple(why), rejected, sha256=build.sha256, cuda=build.cuda)
        return SystemPackages(*common, build.source, tuple(why), rejected, build.packages, build.repository, build.sha256, build.cuda)

    def _why_built(self, host_class: HostClass, build: Build, sharing: HostClasses, able: tuple[Builder, ...]) -> Iterator[str]:
        names = [each.host for each in able]
        on = f"one of {joined(names)}" if len(names) > 1 else names[0]
        yield f"built on {on}, once for hosts with {host_class.system} on {host_class.arch} and CUDA {build.cuda}: {build.evidence}"
        yield from describe_toolkits(able)
        if self.requirements.nccl_tarball:
            official = host_class.catalog.nccl().tarball.sha256.get(build.version)
            same = {None: "no checksum of that release is known", build.sha256: "it is the official one"}
            yield f"from the given file; {same.get(official, 'its checksum is not that of the official one')}"
        if all(other.capabilities for other in sharing):
            found = sorted({each for other in sharing for each in other.capabilities}, key=key)
            yield f"for compute capability {', '.join(found)}, and newer ones with PTX"
        else:
            yield "for every GPU that its CUDA supports: the facts do not say which ones there are"

    def _rejected(self, host_class: HostClass) -> Iterator[Rejected]:
        """Newer builds and other builds of the chosen version one by one; builds that are only older in one line."""
        build, found = self.builds[host_class], self.candidates[host_class]
        older: list[Build] = []
        for other, rejection in sorted(
            found.builds, key=lambda each: (key(each[0].version), key(each[0].cuda), each[0].source), reverse=True
        ):
            if other == build:
                continue
            if rejection:
                yield rejection
            elif cause := self._why_not(host_class, other):
                yield Rejected(other.name, cause)
            else:
                older.append(other)
        yield from found.unavailable
        if older:
            span = f"{older[-1].version} to {older[0].version}" if len(older) > 1 else older[0].version
            yield Rejected(f"{len(older)} builds of NCCL {span}", f"older than {self.version}")

    def _why_not(self, host_class: HostClass, other: Build) -> str | None:
        """Why a build that fits was not chosen; None if it is only older."""
        build = self.builds[host_class]
        weak = f"weak evidence: {other.evidence}" + ("" if other.source == "source" else " only")
        if other.version == self.version:
            if _kept(build, host_class):
                return "an earlier run chose another build of it"
            if host_class.runs_natively(build.cuda) and key(other.cuda) > key(build.cuda):
                return f"the driver runs that for CUDA {build.cuda} natively"
            if other.cuda != build.cuda:
                return f"a build for a larger CUDA fits: {build.cuda}"
            return f"{build.source.replace('_', ' ')} comes before {other.source.replace('_', ' ')}"
        for blocking, names in self.host_classes.items():
            if other.version not in self.candidates[blocking].versions:
                return f"no build of it fits {joined(names)}"
        if other.weak and not build.weak and key(other.cuda)[0] > key(build.cuda)[0]:
            return weak
        if key(other.version) < key(self.version):
            return None
        if key(other.cuda)[0] < key(build.cuda)[0]:
            return f"{self.version} has a build for the driver's CUDA major on more hosts"
        if other.weak:
            return weak
        return f"{self.version} has builds with better evidence, fewer known problems, or a preferred source"


def _toolkit_of(host_class: HostClass, cuda: str) -> tuple[str, str] | None:
    """(folder, why) of the toolkit with which a host class can build for this CUDA."""
    compiler = own_compiler(host_class)
    return (compiler[1].path, compiler[2]) if compiler and compiler[0] == cuda else None


def _conflict(host_classes: HostClasses, found: Mapping[HostClass, Candidates], requirements: Requirements) -> Conflict:
    """The conflict of the host class without which the others would have a version, else of the one with the oldest driver."""

    def others(host_class: HostClass) -> list[Candidates]:
        return [candidates for other, candidates in found.items() if other != host_class]

    def cost(host_class: HostClass) -> tuple[bool, bool, int, tuple[int, ...], str]:
        names = host_classes[host_class]
        unresolved = bool(others(host_class)) and not _common_versions(others(host_class))
        return unresolved, bool(found[host_class].fitting), len(names), key(host_class.cuda or "0"), names[0]

    blocking = min(host_classes, key=cost)
    id: ConflictId
    gpu = f", compute capability {blocking.capabilities[0]}" if blocking.capabilities else ""
    described = f"{blocking.system} on {blocking.arch} with a driver for CUDA {blocking.cuda}{gpu}"
    if not found[blocking].fitting or len(host_classes) == 1:
        id, reason = _main_reason(found[blocking], requirements)
        what = f"no build of NCCL fits {described}: {reason}"
    else:
        newest = max(found[blocking].versions, key=key)
        common = sorted(_common_versions(others(blocking)), key=key)
        theirs = f"the others need {common[0]} to {common[-1]}" if common else "the others have none in common either"
        id, what = "nccl-not-the-same", f"NCCL must be the same everywhere; {described} allows up to {newest}, {theirs}"
    return Conflict(id, host_classes[blocking][0], what, _proposals(blocking, host_classes, requirements))


def _main_reason(found: Candidates, requirements: Requirements) -> tuple[ConflictId, str]:
    """(id, the reason): the constraints that reject the newest builds which the driver would run; without any, the driver itself."""
    builds = list(found.builds)
    if requirements.nccl_source == "source":
        if why := next((each for each in found.unavailable if each.id in NOT_BUILT), None):
            return "nccl-source" if why.id == "source" else "nccl-version", why.reason
        builds = [each for each in builds if each[0].source == "source"]
    if requirements.nccl_local:
        builds = [each for each in builds if each[0].source == "local_repository"] or builds
    version = requirements.nccl_version
    if version is not None:
        builds = [each for each in builds if each[0].version == version]
        if not builds:
            known = next((f": {each.reason}" for each in found.unavailable if each.candidate.endswith(f"=={version}")), "")
            return "nccl-version", f"no build of NCCL {version} is known for it{known}"
    if not builds:
        return "nccl-absent", "; ".join(list(dict.fromkeys(each.reason for each in found.unavailable if each.id not in NOT_BUILT))[:3])
    reasons: dict[str, str] = {}
    for build, rejection in sorted(builds, key=lambda each: key(each[0].version), reverse=True):
        if rejection and rejection.id != "driver":
            reasons.setdefault(rejection.id, f"{build.version} for CUDA {build.cuda}: {rejection.reason}")
    oldest = min((build.cuda for build, _rejection in builds), key=key)
    of = f" of {version}" if version else ""
    return "nccl", "; ".join(list(reasons.values())[:3]) or f"the oldest build{of} is for CUDA {oldest}"


def _proposals(blocking: HostClass, host_classes: HostClasses, requirements: Requirements) -> Iterator[Proposal]:
    """Cheapest first: fewer options, fewer hosts, a newer driver."""
    names = host_classes[blocking]
    file = requirements.nccl_local or requirements.nccl_tarball
    source = None if file or requirements.nccl_source == "auto" else requirements.nccl_source
    if used := [f"--nccl {value}" for value in (requirements.nccl_version, source, file) if value]:
        yield change_requirements(f"leave {' and '.join(used)} out: the plan finds one that fits", **_NOT_REQUESTED)
    if requirements.nccl_source == "source":
        yield from _ability_to_build(blocking, names)
        if requirements.nccl_version and not requirements.nccl_tarball:
            name = f"nccl-{requirements.nccl_version}-1.tar.gz"
            tarball = {"nccl_tarball": name, "nccl_tarball_version": requirements.nccl_version}
            yield change_requirements(f"--nccl {name}, your own file", **tarball)
    if requirements.nccl_strict:
        yield change_requirements("--nccl compatible: also builds for a newer CUDA of the driver's major", nccl_strict=False)
    if (version := requested_version(requirements)) and not requirements.allow_bad:
        yield change_requirements(f"--allow-bad takes {version} all the same", allow_bad=True)
    if blocking.installed_nccl:
        installed = " and ".join(f"{name} {version}" for name, version in blocking.installed_nccl)
        yield change_requirements(f"--allow-downgrade replaces {installed} on {joined(names)} by an older one", allow_downgrade=True)
    yield exclude(names)
    yield from newer_drivers(blocking, host_classes)
    yield Proposal(f"give {joined(names)} a GPU and a driver that NVIDIA still builds NCCL for")


def _ability_to_build(blocking: HostClass, names: list[str]) -> Iterator[Proposal]:
    """What a host needs to build NCCL."""
    missing, able = list(blocking.missing_build_tools), replace(blocking, missing_build_tools=())
    if not fitting_compilers(blocking):
        missing.append(f"a CUDA toolkit of {blocking.cuda} or older with nvcc")
        able = replace(able, toolkits=(Toolkit(version=blocking.cuda),))
    if missing:
        yield change_classes(f"install {' and '.join(missing)} on {joined(names)}", {blocking: able})
