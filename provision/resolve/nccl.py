"""NCCL: ONE version for the whole inventory, since versions do not talk to each other; per host the largest CUDA build of it that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from provision import catalog
from provision.base.text import joined
from provision.base.versions import key
from provision.plan.model import Builder, Nccl, Rejected, SourceBuild, SystemPackages, Wheel
from provision.plan.requirements import Requirements
from provision.resolve import nccl_sources, toolkits
from provision.resolve.blocked import Attempt, Blocked, ask, become, leave_out, newer_drivers
from provision.resolve.machine import USUAL_TOOLKIT, Machine, Toolkit
from provision.resolve.nccl_builds import FROM_SOURCE, SOURCES, Build, builds, downgrades, local_repository

_SOURCE_OF_WISH = {
    "wheel": "wheel",
    "repository": "repository",
    "local": "local_repository",
    "distribution": "distribution",
    "source": "source",
}


@dataclass(frozen=True)
class _Choice:
    """A build for every kind of host, all of one version."""

    version: str
    builds: Mapping[Machine, Build]


def nccl(kinds: Mapping[Machine, list[str]], requirements: Requirements) -> tuple[dict[Machine, Nccl], list[str]]:
    """(NCCL for every kind of host that has a GPU and a driver, notes about where hosts and catalogue differ)

    Args:
        kinds: kind of host → the names of its hosts.

    Raises:
        Blocked: no version fits all; it names the host that blocks.
    """
    wanting = {kind: names for kind, names in kinds.items() if kind.cuda is not None}
    if not wanting:
        return {}, _without_effect(requirements)
    compilers = nccl_sources.compilers(wanting, _runs)
    known = {kind: builds(kind, requirements, compilers[kind]) for kind in wanting}
    fitting = {kind: _fitting(kind, requirements, compilers[kind]) for kind in wanting}
    choice = _choose(fitting)
    if choice is None:
        raise _blocked(wanting, fitting, requirements, known)
    alone = {kind: {build.version for build in found} for kind, found in fitting.items()}
    everywhere = set.intersection(*alone.values())
    notes = [f"{joined(wanting[kind])}: its package index {said}" for kind in wanting for said in known[kind][2]]
    if "nccl" in requirements.kept:
        notes += [
            f"NCCL {choice.version}, which an earlier run took, is known bad: {said}; --upgrade resolves again"
            for said in _known_bad(choice.version)
        ]
    notes += [
        f"{joined(names)}: {package} {now} is replaced by the older {then}, as --allow-downgrade says"
        for kind, names in wanting.items()
        for package, now, then in downgrades(choice.builds[kind], kind)
    ]
    return {
        kind: _component(kind, choice, known[kind][0], known[kind][1], requirements, everywhere, wanting, alone) for kind in wanting
    }, notes


def _without_effect(requirements: Requirements) -> list[str]:
    """What was asked for of NCCL where no host gets any; what a lock fills in nobody has asked for."""
    if "nccl" in requirements.kept:
        return []
    asked = {"--nccl": requirements.nccl_version, "--nccl-local": requirements.nccl_local, "--nccl-tarball": requirements.nccl_tarball}
    if not any(asked.values()) and requirements.nccl_source != "auto":
        asked["--nccl-source"] = requirements.nccl_source
    known = {".".join(map(str, key(revision))) for revision in catalog.nccl().repository.builds}
    known |= {version for versions in catalog.nccl().wheels.builds.values() for version in versions}
    unknown = requirements.nccl_version is not None and requirements.nccl_version not in known
    return [
        f"{option} {value} has no effect: none of these hosts has a GPU that is used"
        + ("; nor is any build of that version known" if option == "--nccl" and unknown else "")
        for option, value in asked.items()
        if value
    ]


@dataclass(frozen=True)
class Misfit:
    """Why a build cannot be used on a kind of host: which reason it is, and the reason as people read it, with its detail."""

    reason: Literal["driver", "privileges", "gpu", "installed", "known bad", "version", "source", "too new"]
    cause: str
    detail: str = ""

    def of(self, build: Build) -> Rejected:
        """The build as one that lost because of this."""
        return Rejected(build.name, self.cause, self.detail)


def misfit(build: Build, kind: Machine, requirements: Requirements) -> Misfit | None:
    """Why this build cannot be used on this kind of host; None when it can. The most telling reason comes first."""
    known = catalog.nccl()
    asked = build.version == _version_asked(requirements)
    if kind.cuda is not None and key(build.cuda) > key(kind.cuda):
        return Misfit("driver", f"newer than the driver's CUDA {kind.cuda}")
    if not kind.root and build.source not in ("wheel", "source"):
        return Misfit("privileges", "it is installed as root, which is not to be had there")
    unfit = _wrong_gpu(build.cuda, kind) or _no_code(build, kind)
    if unfit:
        return unfit
    if not requirements.allow_downgrade and (older := downgrades(build, kind)):
        return Misfit("installed", f"{older[0][0]} {older[0][1]} is installed there, which is newer; --allow-downgrade replaces it")
    bad = _known_bad(build.version)
    if bad and not (asked and requirements.allows_bad("nccl")):
        return Misfit("known bad", f"known bad: {bad[0]}")
    if requirements.nccl_version is not None and not asked:
        return Misfit("version", f"--nccl {requirements.nccl_version} was asked for")
    if requirements.nccl_source != "auto" and build.source != _SOURCE_OF_WISH[requirements.nccl_source]:
        return Misfit("source", f"--nccl-source {requirements.nccl_source} was asked for")
    if key(build.version) > key(known.known_bad_covers) and not asked:
        covered = f"what the list of known bad releases covers ({known.known_bad_covers})"
        return Misfit("too new", f"newer than {covered}; --nccl {build.version} takes it")
    return None


@lru_cache(maxsize=256)  # a remedy is tried by asking all again, with one kind of host or one requirement changed
def _fitting(kind: Machine, requirements: Requirements, compilers: tuple[str, ...]) -> list[Build]:
    return [build for build in builds(kind, requirements, compilers)[0] if misfit(build, kind, requirements) is None]


def _version_asked(requirements: Requirements) -> str | None:
    """The version that the user named, by itself or by giving a file."""
    local = local_repository(requirements.nccl_local) if requirements.nccl_local else None
    return requirements.nccl_version or requirements.nccl_tarball_version or (local.version if local else None)


def _runs(kind: Machine, cuda: str) -> bool:
    """Whether its driver and GPUs run what is built for this CUDA."""
    return key(cuda) <= key(kind.cuda or "0") and _wrong_gpu(cuda, kind) is None


def _wrong_gpu(cuda: str, kind: Machine) -> Misfit | None:
    known = catalog.cuda()
    floor = known.gpu_floors.lowest.get(cuda.split(".")[0])
    if kind.capabilities and floor and key(kind.capabilities[0]) < key(floor):
        return Misfit("gpu", f"its CUDA has no code for compute capability {kind.capabilities[0]} any more", f"from {floor} on")
    oldest = known.gpu_ceilings.oldest
    for capability in reversed(kind.capabilities):
        named = max((each for each in oldest if key(each) <= key(capability)), key=key, default=None)
        if named and key(cuda) < key(oldest[named]):
            return Misfit("gpu", f"its CUDA does not know compute capability {capability} yet", f"{oldest[named]} or newer")
    return None


def _no_code(build: Build, kind: Machine) -> Misfit | None:
    """Why a build of NVIDIA's does not run on these GPUs though its CUDA would: which code is in it, the release decides."""
    if build.code and (without := kind.without_code(build.code)):
        lowest = build.code[0]
        has = f"from {lowest} on" if key(without[0]) < key(lowest) else f"only for {', '.join(build.code)}"
        return Misfit("gpu", f"it has no code for compute capability {without[0]}", has)
    if build.source in ("repository", "local_repository") and kind.capabilities:
        floors = catalog.nccl().floors.lowest.get(build.cuda.split(".")[0], {})
        floor = max((floors[first] for first in floors if key(first) <= key(build.version)), key=key, default=None)
        if floor and key(kind.capabilities[0]) < key(floor):
            return Misfit("gpu", f"it has no code for compute capability {kind.capabilities[0]}", f"from {floor} on")
    return None


def _choose(fitting: Mapping[Machine, list[Build]]) -> _Choice | None:
    """The best version that every kind of host can have.

    Best is: builds that are known to exist; on most kinds for the driver's CUDA major; the fewest troubles that a newer release has
    fixed; the source that is preferred; the newest.
    """
    versions = set.intersection(*({build.version for build in found} for found in fitting.values()))
    majors = {kind: max((key(build.cuda)[0] for build in found), default=0) for kind, found in fitting.items()}
    best: tuple[tuple[int, ...], _Choice] | None = None
    for version in sorted(versions, key=key, reverse=True):
        made = _Choice(version, {kind: _best(kind, version, found) for kind, found in fitting.items()})
        score = (
            any(build.weak for build in made.builds.values()),
            sum(key(build.cuda)[0] < majors[kind] for kind, build in made.builds.items()),
            len(_known_weak(version)),
            max(SOURCES.index(build.source) for build in made.builds.values()),
        )
        if best is None or score < best[0]:
            best = score, made
    return best[1] if best else None


def _best(kind: Machine, version: str, found: Iterable[Build]) -> Build:
    """Of the builds of a version the one that an earlier run took, else that for the largest CUDA, the surest, of the preferred source."""

    def cost(build: Build) -> tuple[Any, ...]:
        return not _kept(build, kind), tuple(-part for part in key(build.cuda)), build.weak, SOURCES.index(build.source)

    return min((build for build in found if build.version == version), key=cost)


def _kept(build: Build, kind: Machine) -> bool:
    return (build.package, build.cuda) in kind.builds


def _known_bad(version: str) -> list[str]:
    return catalog.troubles(version, catalog.nccl().known_bad)


def _known_weak(version: str) -> list[str]:
    return catalog.troubles(version, catalog.nccl().known_weak)


def _component(
    kind: Machine,
    choice: _Choice,
    known: list[Build],
    lost: list[Rejected],
    requirements: Requirements,
    everywhere: set[str],
    wanting: Mapping[Machine, list[str]],
    alone: Mapping[Machine, set[str]],
) -> Nccl:
    build = choice.builds[kind]
    why = [kind.cuda_why, f"{choice.version} is the one version for all hosts with GPUs"]
    if kind.capabilities:
        why.append(f"the lowest compute capability is {kind.capabilities[0]}")
    sharing: Mapping[Machine, list[str]] = {}
    builders: tuple[Builder, ...] = ()
    if build.source == "source":
        sharing = {other: names for other, names in wanting.items() if _share(choice, kind, other)}
        builders = nccl_sources.builders(sharing, build.cuda, _runs)
        why += _why_built(kind, build, sharing, builders, requirements)
    else:
        best = "is what an earlier run took" if _kept(build, kind) else "is the largest of it that fits"
        why.append(f"the build for CUDA {build.cuda} {best}" + (f" ({build.evidence})" if build.evidence else ""))
    if build.weak and not sharing:
        why.append("weak: not known for certain to exist; the host's package index decides")
    why += [f"known trouble, fixed only in newer ones: {said}" for said in _known_weak(choice.version)]
    cause = "an earlier run took it" if "nccl" in requirements.kept else "of --allow-bad"
    why += [f"known bad, taken because {cause}: {said}" for said in _known_bad(choice.version)]

    def why_not(other: Build) -> str | None:
        """Why it is not the one though it could be used there; None where it is simply older."""
        if other.version == choice.version:
            if _kept(build, kind):
                return "an earlier run took another build of it"
            if other.cuda != build.cuda:
                return f"a build for a larger CUDA fits: {build.cuda}"
            return f"{build.source.replace('_', ' ')} comes before {other.source.replace('_', ' ')}"
        if other.version not in everywhere:
            blocking = next(each for each in wanting if other.version not in alone[each])
            return f"no build of it fits {joined(wanting[blocking])}"
        if other.weak and not build.weak and key(other.cuda)[0] > key(build.cuda)[0]:
            return _weak(other)
        if key(other.version) < key(choice.version):
            return None
        if key(other.cuda)[0] < key(build.cuda)[0]:
            return f"{choice.version} has a build for the driver's CUDA major on more hosts"
        if other.weak:
            return _weak(other)
        return f"{choice.version} has builds that are surer, or less known trouble, or comes from a preferred source"

    others = [other for other in known if other != build]
    rejected = tuple(_lost(others, lost, choice.version, lambda other: misfit(other, kind, requirements), why_not))
    common = (build.version, build.package)
    if build.source == "source":
        words = nccl_sources.options(sharing)
        return SourceBuild(*common, "source", tuple(why), rejected, build.url, build.sha256, build.cuda, words, builders)
    if build.source == "wheel":
        return Wheel(*common, "wheel", tuple(why), rejected, sha256=build.sha256, cuda=build.cuda)
    return SystemPackages(*common, build.source, tuple(why), rejected, build.packages, build.repository, build.sha256, build.cuda)


def _weak(build: Build) -> str:
    return f"weak: {build.evidence}" if build.source == "source" else f"weak: known from {build.evidence} only"


def _share(choice: _Choice, kind: Machine, other: Machine) -> bool:
    """Whether both kinds of host get the same build of the sources."""
    return nccl_sources.alike(other) == nccl_sources.alike(kind) and choice.builds[other] == choice.builds[kind]


def _why_built(
    kind: Machine, build: Build, sharing: Iterable[Machine], builders: tuple[Builder, ...], requirements: Requirements
) -> Iterator[str]:
    names = [each.host for each in builders]
    on = f"one of {joined(names)}" if len(names) > 1 else names[0]
    yield f"built on {on}, once for hosts with {kind.system} on {kind.arch} that get it for CUDA {build.cuda}: {build.evidence}"
    yield from toolkits.said(builders)
    if requirements.nccl_tarball:
        official = catalog.nccl().tarball.sha256.get(build.version)
        same = {None: "no checksum of that release is known", build.sha256: "it is the official one"}
        yield f"from the file that was given; {same.get(official, 'its checksum is not that of the official one')}"
    if all(other.capabilities for other in sharing):
        found = sorted({each for other in sharing for each in other.capabilities}, key=key)
        yield f"for compute capability {', '.join(found)}, and newer ones by way of PTX"
    else:
        yield "for every GPU that its CUDA knows: the facts do not say which there are"


def _lost(
    others: Iterable[Build],
    absent: Iterable[Rejected],
    chosen: str,
    misfit_of: Callable[[Build], Misfit | None],
    why_not: Callable[[Build], str | None],
) -> Iterator[Rejected]:
    """What lost: newer ones and other builds of the chosen version one by one, what is simply older in one line."""
    older: list[Build] = []
    for build in sorted(others, key=lambda each: (key(each.version), key(each.cuda), each.source), reverse=True):
        if unfit := misfit_of(build):
            yield unfit.of(build)
        elif cause := why_not(build):
            yield Rejected(build.name, cause)
        else:
            older.append(build)
    yield from absent
    if older:
        span = f"{older[-1].version} to {older[0].version}" if len(older) > 1 else older[0].version
        yield Rejected(f"{len(older)} builds of NCCL {span}", f"older than {chosen}")


# --- when nothing fits ---------------------------------------------------------------------------------------------------------------


_Known = Mapping[Machine, tuple[list[Build], list[Rejected], list[str]]]


def _blocked(
    wanting: Mapping[Machine, list[str]], fitting: Mapping[Machine, list[Build]], requirements: Requirements, known: _Known
) -> Blocked:
    """The conflict: the kind of host without which the others would have a version, else the one with the oldest driver."""
    order = sorted(wanting, key=lambda kind: (bool(fitting[kind]), len(wanting[kind]), key(kind.cuda or "0"), wanting[kind][0]))
    blocking = next((kind for kind in order if _works({other: fitting[other] for other in wanting if other != kind})), order[0])
    if not fitting[blocking] or len(wanting) == 1:
        constraint = f"no build of NCCL fits {_described(blocking)}: {_main_reason(blocking, requirements, *known[blocking][:2])}"
    else:
        others = {other: fitting[other] for other in wanting if other != blocking}
        rest = sorted({build.version for found in others.values() for build in found} & _shared(others), key=key)
        versions = {build.version for build in fitting[blocking]}
        theirs = f"the others need {rest[0]} to {rest[-1]}" if rest else "the others have none in common either"
        constraint = f"NCCL must be the same everywhere; {_described(blocking)} allows up to {max(versions, key=key)}, {theirs}"
    return Blocked(wanting[blocking][0], constraint, _attempts(blocking, wanting[blocking], requirements))


def _attempts(blocking: Machine, names: list[str], requirements: Requirements) -> Iterator[Attempt]:
    """Cheapest first: an option less, hosts less, a newer driver."""
    options = {
        "--nccl": requirements.nccl_version,
        "--nccl-source": requirements.nccl_source not in ("auto", "local") and not requirements.nccl_tarball,
        "--nccl-local": requirements.nccl_local,
        "--nccl-tarball": requirements.nccl_tarball,
    }
    given = [option for option, value in options.items() if value]
    if given:
        text = f"leave {' and '.join(given)} out: the plan finds one that fits"
        yield ask(text, nccl_version=None, nccl_source="auto", nccl_local=None, nccl_tarball=None, nccl_tarball_version=None)
    if requirements.nccl_source == "source":
        yield from _able_to_build(blocking, names)
    if requirements.nccl_source == "source" and requirements.nccl_version and not requirements.nccl_tarball:
        name = f"nccl-{requirements.nccl_version}-1.tar.gz"
        yield ask(f"--nccl-tarball {name}, a file of yours", nccl_tarball=name, nccl_tarball_version=requirements.nccl_version)
    if (asked := _version_asked(requirements)) and not requirements.allow_bad:
        yield ask(f"--allow-bad takes {asked} all the same", allow_bad=True)
    if blocking.own_nccl:
        replaced = " and ".join(f"{name} {version}" for name, version in blocking.own_nccl)
        yield ask(f"--allow-downgrade replaces {replaced} on {joined(names)} by an older one", allow_downgrade=True)
    yield leave_out(names)
    yield from newer_drivers(blocking, names)
    yield Attempt(f"give {joined(names)} a GPU and a driver that NVIDIA still builds NCCL for")


def _able_to_build(blocking: Machine, names: list[str]) -> Iterator[Attempt]:
    """What a host lacks to build it."""
    lacking, able = [], blocking
    if not blocking.make:
        lacking.append("make")
        able = replace(able, make=True)
    if toolkits.for_compiling(blocking, lambda cuda: _runs(blocking, cuda)) is None:
        lacking.append(f"a CUDA toolkit of {blocking.cuda} or older with nvcc")
        able = replace(able, toolkits=(Toolkit(USUAL_TOOLKIT, blocking.cuda),))
    if lacking:
        yield become(f"install {' and '.join(lacking)} on {joined(names)}", lambda kind: able if kind == blocking else kind)


def _works(fitting: Mapping[Machine, list[Build]]) -> bool:
    return not fitting or bool(_shared(fitting))


def _shared(fitting: Mapping[Machine, list[Build]]) -> set[str]:
    return set.intersection(*({build.version for build in found} for found in fitting.values())) if fitting else set()


def _described(kind: Machine) -> str:
    gpu = f", compute capability {kind.capabilities[0]}" if kind.capabilities else ""
    return f"{kind.system} on {kind.arch} with a driver for CUDA {kind.cuda}{gpu}"


def _main_reason(kind: Machine, requirements: Requirements, known: list[Build], lost: list[Rejected]) -> str:
    """What stands in the way of the builds that the driver would run, of the newest first; without any, the driver itself."""
    if requirements.nccl_source == "source":
        if no_build := next((each.reason for each in lost if each.candidate == FROM_SOURCE), None):
            return no_build
        known = [build for build in known if build.source == "source"]
    if requirements.nccl_version is not None:
        known = [build for build in known if build.version == requirements.nccl_version]
        if not known:
            said = next((f": {each.reason}" for each in lost if each.candidate.endswith(f"=={requirements.nccl_version}")), "")
            return f"no build of NCCL {requirements.nccl_version} is known for it{said}"
    if not known:
        return "; ".join(list(dict.fromkeys(each.reason for each in lost if each.candidate != FROM_SOURCE))[:3])
    newest: dict[str, str] = {}
    for build in sorted(known, key=lambda each: key(each.version), reverse=True):
        if (unfit := misfit(build, kind, requirements)) and unfit.reason != "driver":
            newest.setdefault(unfit.reason, f"{build.version} for CUDA {build.cuda}: {unfit.of(build).reason}")
    if newest:
        return "; ".join(list(newest.values())[:3])
    oldest = min((build.cuda for build in known), key=key)
    of = f" of {requirements.nccl_version}" if requirements.nccl_version else ""
    return f"the oldest build{of} is for CUDA {oldest}"
