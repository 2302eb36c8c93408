"""Open MPI: one 4.x for all hosts. The wheel is the same everywhere; the distribution's only where all have the same; else from source."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from provision import catalog
from provision.base.text import joined
from provision.base.versions import key, minor
from provision.plan.model import OpenMpi, Rejected, SourceBuild, SystemPackages, Wheel
from provision.plan.requirements import Requirements
from provision.resolve import openmpi_sources, toolkits
from provision.resolve.blocked import Attempt, Blocked, Kinds, ask, become, leave_out
from provision.resolve.machine import USUAL_TOOLKIT, Machine, Toolkit

_FOR_GPUS = "with support for buffers in GPU memory, as asked for"
_TARBALL = re.compile(r"openmpi-(?P<version>\d+\.\d+\.\d+)\.tar\.(gz|bz2|xz)")


@dataclass(frozen=True)
class _Misfit:
    """Why something cannot be the same on all hosts, and the host that shows it."""

    host: str
    reason: str


def openmpi(kinds: Kinds, requirements: Requirements) -> tuple[dict[Machine, OpenMpi], list[str]]:
    """(the one for every kind of host, notes): one version from one source, built for GPU memory only where there are GPUs.

    Raises:
        Blocked: there is none; it names the host that stands in the way.
    """
    chosen = _chosen(kinds, requirements)
    without_gpu = chosen
    if isinstance(chosen, SourceBuild) and chosen.cuda:
        options = tuple(word for word in chosen.options if word not in catalog.openmpi().tarball.cuda)
        why = tuple(said if said != _FOR_GPUS else "there is no GPU here: without support for GPU memory" for said in chosen.why)
        without_gpu = replace(chosen, cuda=None, options=options, why=why)
    made: dict[Machine, OpenMpi] = {kind: chosen if kind.cuda else without_gpu for kind in kinds}
    notes = list(_differences(kinds))
    if "openmpi" in requirements.kept:
        notes += [
            f"Open MPI {chosen.version}, which an earlier run took, is known bad: {said}; --upgrade resolves again"
            for said in _known_bad(chosen.version, requirements)
        ]
    if isinstance(chosen, SourceBuild):
        builders = openmpi_sources.builders(kinds, chosen.cuda)
        made = {
            kind: replace(each, builders=builders[kind], why=(*each.why, *toolkits.said(builders[kind])))
            for kind, each in made.items()
            if isinstance(each, SourceBuild)
        }
        unknown = sorted({able[0].host for able in builders.values() if able and able[0].why == toolkits.UNKNOWN})
        if unknown:
            notes.append(f"{joined(unknown)}: Open MPI is built with the CUDA toolkit at {USUAL_TOOLKIT}; {toolkits.UNKNOWN}")
    return made, notes


def _chosen(kinds: Kinds, requirements: Requirements) -> OpenMpi:
    version = _asked_version(kinds, requirements)
    distribution = _distribution(kinds, requirements)
    wheel = _wheel(kinds, version, requirements)
    source = _source(kinds, version, requirements)
    candidates: dict[str, OpenMpi | _Misfit] = {"wheel": wheel, "distribution": distribution, "source": source}
    if isinstance(distribution, SystemPackages) and version and key(distribution.version) != key(version):
        candidates["distribution"] = _Misfit(_first(kinds), f"{version} was asked for")
    elif requirements.openmpi_tarball or requirements.openmpi_cuda or requirements.openmpi_verbs:
        candidates["distribution"] = _Misfit(_first(kinds), "a build of its own was asked for")
    if requirements.openmpi != "auto":
        chosen = candidates[requirements.openmpi]
        if isinstance(chosen, _Misfit):
            raise Blocked(chosen.host, chosen.reason, _attempts(kinds, requirements, chosen.host))
        return replace(chosen, rejected=_lost(candidates, requirements.openmpi, f"--openmpi {requirements.openmpi} was asked for"))
    for name, found in candidates.items():
        if not isinstance(found, _Misfit):
            return replace(found, rejected=_lost(candidates, name, f"the {name} comes first"))
    misfit = next(found for found in (source, wheel, distribution) if isinstance(found, _Misfit))
    raise Blocked(misfit.host, misfit.reason, _attempts(kinds, requirements, misfit.host))


def tarball_version(name: str) -> str | None:
    """The version that a tarball's name says, ``openmpi-4.1.8.tar.gz``; None when it is none of Open MPI's."""
    found = _TARBALL.fullmatch(name)
    return found["version"] if found else None


def known_checksum(name: str) -> str | None:
    """The SHA-256 of the official tarball of that name; None where the catalogue has none."""
    entry = catalog.openmpi().tarball.sha256.get(tarball_version(name) or "")
    return entry.value if entry and name.endswith(f".tar.{entry.ending}") else None


def _asked_version(kinds: Kinds, requirements: Requirements) -> str | None:
    """The version that the user named, by itself or in a tarball's name. Raises Blocked for one that must not be used."""
    version = requirements.openmpi_version or (tarball_version(requirements.openmpi_tarball) if requirements.openmpi_tarball else None)
    if version is None:
        return None
    named = [option for option, asked in _versions_asked(requirements) if asked]
    default = catalog.openmpi().tarball.default
    way = ask(f"leave {' and '.join(named)} out: the plan takes {default}", openmpi_version=None, openmpi_tarball=None)
    if key(version)[0] != 4:
        other = ask(f"--openmpi-version {default}", openmpi_version=default, openmpi_tarball=None)
        raise Blocked(_first(kinds), f"Open MPI {version} was asked for; only 4.x starts jobs the way this does", (way, other))
    bad = _known_bad(version, requirements)
    if bad and not requirements.allows_bad("openmpi"):
        name = f"openmpi-{version}.tar.gz"
        allowed = ask("--allow-bad takes it all the same", allow_bad=True)
        given = ask(f"--allow-bad with --openmpi-tarball {name}, a file of yours", allow_bad=True, openmpi_tarball=name)
        without_cuda = [ask("leave --openmpi-cuda out", openmpi_cuda=False)] if requirements.openmpi_cuda else []
        raise Blocked(_first(kinds), f"Open MPI {version} is known bad: {bad[0]}", (way, *without_cuda, allowed, given))
    return version


def _known_bad(version: str, requirements: Requirements) -> list[str]:
    """What is known against a version, for what it is wanted for."""
    known = catalog.openmpi()
    return catalog.troubles(version, [*known.known_bad, *(known.known_bad_with_cuda if requirements.openmpi_cuda else ())])


def _wheel(kinds: Kinds, version: str | None, requirements: Requirements) -> Wheel | _Misfit:
    wheel = catalog.openmpi().wheel
    lacking = [names[0] for kind, names in kinds.items() if kind.arch not in wheel.architectures]
    if lacking:
        arch = next(kind.arch for kind in kinds if kind.arch not in wheel.architectures)
        return _Misfit(min(lacking), f"no Open MPI wheel for {arch}")
    without = sorted(name for kind, names in kinds.items() if wheel.version not in _wheels(kind, wheel) for name in names)
    if without:
        return _Misfit(without[0], f"the index that pip asks on {joined(without)} has no Open MPI wheel {wheel.version}")
    if version is not None and key(version) != key(wheel.version):
        return _Misfit(_first(kinds), f"the wheel is {wheel.version}, {version} was asked for")
    if requirements.openmpi_cuda:
        return _Misfit(_first(kinds), "the wheel is built without CUDA, which was asked for")
    if requirements.openmpi_verbs:
        return _Misfit(_first(kinds), "the wheel is built without verbs, which were asked for")
    if requirements.openmpi_tarball:
        return _Misfit(_first(kinds), f"{requirements.openmpi_tarball} was given")
    why = ("the same bits on every distribution, with its own hwloc and PMIx; the last 4.x release",)
    return Wheel(wheel.version, f"{wheel.package}=={wheel.version}", "wheel", why)


def _wheels(kind: Machine, wheel: catalog.models.OpenmpiWheel) -> tuple[str, ...]:
    """The versions of the wheel: what the host says counts, without its word the catalogue."""
    offered = kind.wheels_offered(wheel.package)
    return (wheel.version,) if offered is None else offered


def _distribution(kinds: Kinds, requirements: Requirements) -> SystemPackages | _Misfit:
    """The distribution's 4.x if all hosts have the same good one. What a host's own package index says wins over the catalogue."""
    known = catalog.openmpi().distribution
    found: dict[str, str] = {}
    for kind, names in sorted(kinds.items(), key=lambda each: each[1][0]):
        if kind.family in known.unfit:
            return _Misfit(names[0], known.unfit[kind.family])
        package = known.package[kind.family]
        version = _offered(kind) or _listed(kind)
        if not kind.root:
            return _Misfit(names[0], f"{names[0]}: only root can install the distribution's")
        if version is None:
            return _Misfit(names[0], f"{kind.system}: no 4.x known there")
        if key(version)[0] != 4:
            return _Misfit(names[0], f"{kind.system} has Open MPI {version}, not a 4.x")
        found[names[0]] = version
    name = list(found)[-1]
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{host} has {version}" for host, version in list(found.items())[:4])
        return _Misfit(name, f"the distributions differ: {listed}")
    version = found[name]
    bad = _known_bad(version, requirements)
    if bad and not (requirements.openmpi_version == version and requirements.allows_bad("openmpi")):
        return _Misfit(name, f"the distribution's {version} is known bad: {bad[0]}")
    why = [f"every host's distribution has the same {version}"]
    why += [f"known trouble, fixed only in newer ones: {said}" for said in catalog.troubles(version, catalog.openmpi().known_weak)]
    return SystemPackages(version, package, "distribution", tuple(why))


def _offered(kind: Machine) -> str | None:
    """The version of the distribution's package, by the host's own package index."""
    package = catalog.openmpi().distribution.package.get(kind.family, "")
    return next((".".join(map(str, key(each))) for each in kind.offered(package)), None)


def _listed(kind: Machine) -> str | None:
    """The same, by the catalogue."""
    known = catalog.openmpi().distribution
    version: str | None = kind.of_system(known.versions) or kind.of_system(known.not_4x)
    return version


def _differences(kinds: Kinds) -> Iterator[str]:
    """Where the hosts' own package indexes and the catalogue differ."""
    for kind, names in kinds.items():
        offered, listed = _offered(kind), _listed(kind)
        if offered and listed and key(offered) != key(listed):
            yield f"{joined(names)}: its package index offers Open MPI {offered}, the catalogue says {listed}: what the host says counts"
        wheel = catalog.openmpi().wheel
        if wheel.version not in _wheels(kind, wheel):
            yield (
                f"{joined(names)}: its package index for Python does not offer Open MPI {wheel.version}, as the catalogue says: "
                "what the host says counts"
            )


def _source(kinds: Kinds, version: str | None, requirements: Requirements) -> SourceBuild | _Misfit:
    known = catalog.openmpi().tarball
    version = version or known.default
    why = [f"built once per distribution and architecture: {_distinct(kinds)} of them here"]
    options = known.options + (known.verbs if requirements.openmpi_verbs else known.no_verbs)
    cuda = None
    if requirements.openmpi_cuda:
        cuda = _cuda(kinds)
        if cuda is None:
            return _Misfit(_first(kinds), "--openmpi-cuda was asked for, but no host has a GPU with a driver")
        options += tuple(known.cuda)
        why.append(_FOR_GPUS)
    without_make, without_toolkit = openmpi_sources.lacking(kinds, cuda)
    if without_make:
        return _Misfit(without_make[0], f"it is built with make, which is not on {joined(without_make)}, and only root could install it")
    if without_toolkit:
        said = f"--openmpi-cuda was asked for, and there is no CUDA toolkit on {joined(without_toolkit)} (in {toolkits.LOOKED_AT})"
        return _Misfit(without_toolkit[0], said)
    why += [f"known trouble, fixed only in newer ones: {said}" for said in catalog.troubles(version, catalog.openmpi().known_weak)]
    if requirements.openmpi_tarball:
        if tarball_version(requirements.openmpi_tarball) != version:
            return _Misfit(_first(kinds), f"{requirements.openmpi_tarball} is not Open MPI {version}, which was asked for")
        why.append("from the file that was given")
        return SourceBuild(
            version,
            requirements.openmpi_tarball,
            "source",
            tuple(why),
            sha256=requirements.openmpi_tarball_sha256,
            cuda=cuda,
            options=options,
        )
    checksum = known.sha256.get(version)
    if checksum is None:
        there = ", ".join(sorted(known.sha256, key=key))
        return _Misfit(_first(kinds), f"no checksum of Open MPI {version}'s tarball is known (there are those of {there})")
    url = known.url.format(series=minor(version), version=version, ending=checksum.ending)
    return SourceBuild(version, url.rsplit("/", 1)[-1], "source", tuple(why), url=url, sha256=checksum.value, cuda=cuda, options=options)


def _lost(candidates: Mapping[str, OpenMpi | _Misfit], chosen: str, reason: str) -> tuple[Rejected, ...]:
    lost = []
    for name, found in candidates.items():
        if name == chosen:
            continue
        if isinstance(found, _Misfit):
            label = {"wheel": "the wheel", "distribution": "the distribution's package", "source": "a build from source"}[name]
            lost.append(Rejected(label, found.reason))
        else:
            lost.append(Rejected(f"{found.package} {found.version}", _worse(name, found, candidates[chosen], reason)))
    return tuple(lost)


def _worse(name: str, lost: OpenMpi, chosen: OpenMpi | _Misfit, reason: str) -> str:
    if not isinstance(chosen, _Misfit) and name == "distribution" and key(lost.version) < key(chosen.version):
        return f"the {chosen.source} is newer"
    if isinstance(chosen, Wheel) and name == "source":
        return "the wheel is the same version and needs no ten minutes of building"
    return reason


def _versions_asked(requirements: Requirements) -> tuple[tuple[str, str | None], ...]:
    return ("--openmpi-version", requirements.openmpi_version), ("--openmpi-tarball", requirements.openmpi_tarball)


def _attempts(kinds: Kinds, requirements: Requirements, host: str) -> Iterator[Attempt]:
    """Cheapest first: another source, an option less, a file, hosts less, work on the hosts."""
    if requirements.openmpi != "auto":
        for name in ("wheel", "distribution", "source"):
            yield ask(f"--openmpi {name}", openmpi=name)
    for option, given in _versions_asked(requirements):
        if given:
            yield ask(f"leave {option} out", **{option.lstrip("-").replace("-", "_"): None})
    if requirements.openmpi_cuda:
        yield ask("leave --openmpi-cuda out", openmpi_cuda=False)
    if requirements.openmpi_verbs:
        yield ask("leave --openmpi-verbs out", openmpi_verbs=False)
    if requirements.openmpi_version and not requirements.openmpi_tarball:
        name = f"openmpi-{requirements.openmpi_version}.tar.gz"
        yield ask(f"--openmpi-tarball {name}, a file of yours", openmpi_tarball=name)
    yield leave_out(next(names for names in kinds.values() if host in names))
    yield from _able_to_build(kinds, requirements)
    if requirements.openmpi == "distribution":
        yield Attempt("bring all hosts to one distribution release")


def _able_to_build(kinds: Kinds, requirements: Requirements) -> Iterator[Attempt]:
    """What hosts lack that are to build it."""
    cuda = _cuda(kinds) if requirements.openmpi_cuda else None
    without_make, without_toolkit = openmpi_sources.lacking(kinds, cuda)
    if without_make:
        yield become(f"install make on {joined(without_make)}", lambda kind: replace(kind, make=True))
    if without_toolkit:
        text = f"install a CUDA toolkit on {joined(without_toolkit)}"
        yield become(
            text, lambda kind: kind if _has_headers(kind) or kind.cuda is None else replace(kind, toolkits=(Toolkit(USUAL_TOOLKIT, cuda),))
        )


def _has_headers(kind: Machine) -> bool:
    return any(toolkit.headers for toolkit in kind.toolkits or ())


def _cuda(kinds: Kinds) -> str | None:
    """The lowest CUDA of the hosts' drivers; None where no host has a GPU with a driver."""
    return min((kind.cuda for kind in kinds if kind.cuda), key=key, default=None)


def _distinct(kinds: Kinds) -> int:
    return len({(kind.system, kind.arch) for kind in kinds})


def _first(kinds: Kinds) -> str:
    return min(names[0] for names in kinds.values())
