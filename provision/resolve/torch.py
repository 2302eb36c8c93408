"""PyTorch: one release for all hosts; per host a build that its driver runs and that has code for its GPUs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from provision.base.text import joined
from provision.base.validation import did_you_mean
from provision.base.versions import key
from provision.catalog import Catalog
from provision.catalog.models import PytorchBuild, PytorchDefault, PytorchRelease, RocmBuild
from provision.plan.model import Rejected, Wheel
from provision.plan.requirements import Requirements
from provision.resolve import python
from provision.resolve.host_classes import HostClass, HostClasses, Interpreter
from provision.resolve.remedies import (
    CPU_ONLY,
    Conflict,
    Proposal,
    change_classes,
    change_requirements,
    exclude,
    newer_drivers,
    other_pythons,
)

CPU, CUDA, ROCM = "cpu", "cu", "rocm"  # tags of builds are one of these, with a version without dots for CUDA

Interpreters = Mapping[HostClass, Interpreter]
Tags = Mapping[HostClass, str]  # of the build of each host class: ``cpu``, ``cu126``, ``rocm7.2``, …
_Cost = tuple[bool, bool, bool, int]


@dataclass(frozen=True)
class _Selection:
    """The best release with its builds, those that fit all hosts, and why others do not."""

    version: str
    fitting: Mapping[str, Tags]
    rejections: Mapping[str, Rejected | None]
    catalog: Catalog

    @property
    def cost(self) -> _Cost:
        """Its place in the order of releases."""
        return _cost(self.version, self.fitting[self.version], list(self.rejections), self.catalog)


def choose(host_classes: HostClasses, requirements: Requirements) -> tuple[dict[HostClass, Interpreter], dict[HostClass, Wheel], list[str]]:
    """(interpreters, PyTorch, notes): the choice of interpreters that leads to the best PyTorch, of several the one that changes least.

    Without PyTorch it is the first that can be used.

    Raises:
        Conflict: that of the first choice, if there is none.
    """
    torch_conflict, python_conflict = None, None
    best: tuple[_Cost, dict[HostClass, Interpreter]] | None = None
    preferred = _pythons_of_releases(requirements) if requirements.torch else [tuple(requirements.catalog.python_packages().numpy.of)]
    lowest = _lowest_cost(host_classes, requirements) if requirements.torch else None
    tried: set[tuple[str, ...]] = set()
    for pythons in python.candidates(host_classes, preferred, requirements):
        versions = tuple(interpreter.minor for interpreter in pythons.values())
        if versions in tried:
            continue
        tried.add(versions)
        rejected = next(
            ((each, found) for each, chosen in pythons.items() if (found := python.rejection(chosen, requirements.catalog))), None
        )
        if rejected:
            host_class, why = rejected
            names = host_classes[host_class]
            proposals = (*other_pythons(host_class, names, preferred[0] if preferred else ()), exclude(names))
            python_conflict = python_conflict or Conflict("python", names[0], why.cause, proposals)
            continue
        if not requirements.torch:
            return pythons, {}, []
        try:
            cost = _select(host_classes, pythons, requirements).cost
        except Conflict as conflict:
            torch_conflict = torch_conflict or conflict
            continue
        if best is None or cost < best[0]:
            best = cost, pythons
        if cost == lowest:
            break
    if best:
        return best[1], *_components(host_classes, best[1], requirements)
    raise torch_conflict or python_conflict or RuntimeError("no Python was tried")


def _components(host_classes: HostClasses, pythons: Interpreters, requirements: Requirements) -> tuple[dict[HostClass, Wheel], list[str]]:
    """(PyTorch for every host class, notes): the best release of which all builds have the same NCCL inside, else the best that fits.

    Raises:
        Conflict: no release fits all hosts.
    """
    selection = _select(host_classes, pythons, requirements)
    version, tags = selection.version, selection.fitting[selection.version]
    releases = tuple(_rejected_releases(selection))
    components = {
        each: _component(version, tags[each], each, pythons[each], requirements, (*_rejected_builds(version, tags[each], each), *releases))
        for each in host_classes
    }
    notes = [*_notes_on_an_older_release(selection, host_classes, pythons, requirements)]
    inside = _nccls(version, tags)
    if {tag.startswith(ROCM) for tag in tags.values() if tag != CPU} == {True, False}:
        notes.append(_note_on_two_vendors(host_classes, tags))
    if len(inside) > 1:
        listed = ", ".join(f"{tags[each]} on {host_classes[each][0]} {nccl}" for nccl, each in inside.items())
        notes.append(
            f"PyTorch {version} contains different NCCLs ({listed}) and no one build runs everywhere: its own NCCL backend will refuse to "
            "work across these hosts"
        )
    return components, notes


def _lowest_cost(host_classes: HostClasses, requirements: Requirements) -> _Cost:
    """The cost of the best release for these drivers and GPUs: no choice of interpreters has a lower one."""
    releases, known = _releases(requirements), requirements.catalog.pytorch().releases
    fitting = [each for each in releases if each in known and all(_tags(each, one, requirements) for one in host_classes)]
    costs = (_cost(each, _with_same_nccl(each, host_classes, requirements), releases, requirements.catalog) for each in fitting)
    return min(costs, default=(False, False, False, 0))


def _pythons_of_releases(requirements: Requirements) -> list[tuple[str, ...]]:
    """The Pythons that each release has wheels for, the best release first."""
    known = requirements.catalog.pytorch().releases
    return [known[version].pythons for version in _releases(requirements) if version in known]


def _select(host_classes: HostClasses, pythons: Interpreters, requirements: Requirements) -> _Selection:
    rejections = {version: _rejection(version, host_classes, pythons, requirements) for version in _releases(requirements)}
    fitting = {
        version: _with_same_nccl(version, host_classes, requirements) for version, rejection in rejections.items() if rejection is None
    }
    if not fitting:
        of_systems = [version for version, rejection in rejections.items() if rejection and rejection.id != "too new"]
        widest = _widest(of_systems or rejections, requirements.catalog)
        found = min((each for each in rejections.values() if each), key=lambda each: (each.id == "python", each != rejections[widest]))
        raise Conflict("torch", found.host, found.cause, _proposals(found.host, host_classes, requirements))
    best = min(fitting, key=lambda each: _cost(each, fitting[each], list(rejections), requirements.catalog))
    return _Selection(best, fitting, rejections, requirements.catalog)


def _cost(version: str, tags: Tags, releases: Sequence[str], catalog: Catalog) -> _Cost:
    """The order of releases: known bad ones last, before them those whose builds have several NCCLs inside, then weak evidence, else as
    listed. Defaults are alike: no Python is changed for the better of two."""
    weak = any(build and build.weak for tag in tags.values() if (build := _build(version, tag, catalog)))
    place = 0 if _default(version, catalog) else releases.index(version)
    return bool(catalog.known_bad("pytorch", version)), len(_nccls(version, tags)) > 1, weak, place


def _widest(releases: Iterable[str], catalog: Catalog) -> str:
    """The release that reasons are about where no default fits: the last default, which is for the most hosts; the requested one."""
    return [each for number, each in enumerate(releases) if number == 0 or _default(each, catalog)][-1]


def _default(version: str, catalog: Catalog) -> PytorchDefault | None:
    """Why a release is one of the defaults; None if it is not."""
    return next((each for each in catalog.pytorch().defaults if each.version == version), None)


def nccl_inside(wheel: Wheel | None, catalog: Catalog) -> str | None:
    """The NCCL inside a build of PyTorch; None if the catalogue does not know it."""
    release = catalog.pytorch().releases.get(wheel.version.partition("+")[0]) if wheel else None
    build = release.builds.get(wheel.cuda) if release and wheel and wheel.cuda else None
    return build.nccl if build else None


def _note_on_two_vendors(host_classes: HostClasses, tags: Tags) -> str:
    """What it costs that no library of collectives connects GPUs of both vendors."""
    of_amd, others = (
        joined(sorted(name for each, names in host_classes.items() if tags[each].startswith(vendor) for name in names))
        for vendor in (ROCM, CUDA)
    )
    return (
        f"{of_amd}: AMD's GPUs, and {others} NVIDIA's: neither NCCL nor RCCL connects both. Start jobs on the hosts of one vendor "
        "(--limit), which go from GPU to GPU. Over both, all ranks send their gradients through host memory: every step waits for a copy "
        "to the CPU and back and for the hosts' network, without GPUDirect; torch.distributed needs gloo"
    )


def _build(version: str, tag: str, catalog: Catalog) -> PytorchBuild | RocmBuild | None:
    """A build with its tag; None for the CPU build, and where the catalogue does not know it."""
    release = catalog.pytorch().releases.get(version)
    if tag.startswith(ROCM):
        return catalog.pytorch().rocm.of[tag.removeprefix(ROCM)] if release and tag.removeprefix(ROCM) in release.rocm else None
    return release.builds.get(_cuda(tag)) if release else None


def _releases(requirements: Requirements) -> list[str]:
    """Releases, best first: the requested one, else the catalogue's defaults and all others."""
    if requirements.torch_version:
        return [requirements.torch_version]
    known = requirements.catalog.pytorch()
    return list(dict.fromkeys([*(each.version for each in known.defaults), *sorted(known.releases, key=key, reverse=True)]))


def _rejection(version: str, host_classes: HostClasses, pythons: Interpreters, requirements: Requirements) -> Rejected | None:
    """Why a release cannot be used, for the first host by name that it does not fit."""
    found = _all_rejections(version, host_classes, pythons, requirements)
    return min(found, key=lambda each: (each.host, each.id == "python"), default=None)


def _all_rejections(version: str, host_classes: HostClasses, pythons: Interpreters, requirements: Requirements) -> list[Rejected]:
    """Everything for which a release cannot be used, of every host class that it does not fit."""
    if requirements.torch_index and requirements.torch_version:
        return []  # the user says that it is there
    release = requirements.catalog.pytorch().releases.get(version)
    found, candidate = [], f"torch=={version}"
    for host_class, names in host_classes.items():
        python, builds = pythons[host_class].minor, _tags(version, host_class, requirements)
        if release is None:
            if not _file_of(f"{version}+{builds[0]}", python, host_class.arch, (*requirements.files, *host_class.torch_wheels)):
                unknown = f"the catalogue does not know PyTorch {version}{did_you_mean(version, requirements.catalog.pytorch().releases)}"
                found.append(Rejected(candidate, unknown, id="absent", host=names[0]))
            continue
        if python not in release.pythons:
            reason = f"PyTorch {version} has no wheel for Python {python}"
            lifted_by = _fitting_python(release, host_class, requirements)
            found.append(Rejected(candidate, reason, id="python", host=names[0], lifted_by=lifted_by))
        of_arch = (build.libc for build in release.builds.values() if host_class.cuda and host_class.arch in build.code)
        libc = min((each or release.libc for each in of_arch), key=key, default=release.libc)
        if not builds and host_class.lacks_libc(libc):
            reason = f"the wheels of PyTorch {version} need glibc {libc}, and {host_class.system} has {host_class.libc}"
            found.append(Rejected(candidate, reason, id="too new", host=names[0], lifted_by="a newer system, or a container with one"))
        elif not builds and host_class.targets:
            found.append(_rejected_for_amd(version, release, host_class, names[0]))
        elif not builds:
            gpus, driver = ", ".join(host_class.capabilities), f"a driver for CUDA {host_class.cuda}"
            if not any(_has_code(build.code.get(host_class.arch), host_class) for build in release.builds.values()):
                reason = f"no build of PyTorch {version} for {host_class.arch} has code for compute capability {gpus}"
            elif any(host_class.runs(cuda) for cuda in release.builds):
                reason = f"no build of PyTorch {version} that {driver} runs has code for compute capability {gpus}"
            else:
                reason = f"no build of PyTorch {version} runs on {driver}"
            found.append(Rejected(candidate, reason, id="driver", host=names[0], lifted_by=_fitting_driver(release, host_class)))
    return found


def _rejected_for_amd(version: str, release: PytorchRelease, host_class: HostClass, host: str) -> Rejected:
    """Why none of a release's builds for AMD's GPUs runs on a host class: what the build that is nearest to it lacks."""
    known = host_class.catalog.pytorch().rocm.of
    unfit = [misfit for each in release.rocm if (misfit := _misfit(each, host_class))]
    nearest = max(unfit, key=lambda each: each.id == "driver", default=Rejected("", "none is known", id="absent"))
    oldest = min((known[each].driver for each in release.rocm), key=key, default="")
    lifted_by = f"amdgpu {oldest} or newer" if nearest.id == "driver" else ""
    reason = f"no build of PyTorch {version} for AMD's GPUs fits: {nearest.cause}"
    return Rejected(f"torch=={version}", reason, id=nearest.id, host=host, lifted_by=lifted_by)


def _misfit(rocm: str, host_class: HostClass) -> Rejected | None:
    """Why the builds for a ROCm do not run on a host class with GPUs of AMD. A GPU needs code for exactly its target."""
    build = host_class.catalog.pytorch().rocm.of[rocm]
    without_code = [each for each in host_class.targets if each not in build.code]
    if host_class.arch != "x86_64":
        return Rejected(ROCM + rocm, "those that are known are for x86_64", id="system")
    if without_code:
        return Rejected(ROCM + rocm, f"that for ROCm {rocm} has no code for {', '.join(without_code)}", id="gpu")
    if host_class.amdgpu and key(host_class.amdgpu) < key(build.driver):
        return Rejected(ROCM + rocm, f"that for ROCm {rocm} needs amdgpu {build.driver}, and {host_class.amdgpu} is loaded", id="driver")
    return None


def _fitting_python(release: PytorchRelease, host_class: HostClass, requirements: Requirements) -> str:
    """What would give hosts a Python for which a release has wheels; empty if the plan itself may use or install one."""
    if any(
        each.minor in release.pythons and (requirements.python_downloads or not each.from_uv)
        for each in (host_class.python, *host_class.other_pythons)
    ):
        return ""
    oldest, newest = min(release.pythons, key=key), max(release.pythons, key=key)
    packaged = requirements.catalog.os().pythons(host_class.os_id, host_class.os_version)
    if not host_class.root and (fitting := [each for each in packaged if each in release.pythons]):
        return f"root, who can install the distribution's python{max(fitting, key=key)}"
    return f"a Python {oldest} to {newest} that is installed there, named in the inventory: provision_python=PATH"


def _fitting_driver(release: PytorchRelease, host_class: HostClass) -> str:
    """The oldest driver that runs a build of a release for these GPUs."""
    compatible = host_class.catalog.cuda().minor_compatibility.of
    majors = {cuda.split(".")[0] for cuda, build in release.builds.items() if _has_code(build.code.get(host_class.arch), host_class)}
    drivers = [compatible[major] for major in majors if major in compatible]
    last = host_class.catalog.driver().gpus.last_of(host_class.capabilities)
    until = f", at most branch {last}" if last else ""
    return f"driver {min(drivers, key=key)} or newer{until}" if drivers else "other GPUs"


def _notes_on_an_older_release(
    selection: _Selection, host_classes: HostClasses, pythons: Interpreters, requirements: Requirements
) -> Iterator[str]:
    """Why the plan ends on an older release than the best one, and what would lift it."""
    chosen, best = selection.version, _widest(selection.rejections, selection.catalog)
    if chosen != best and not _default(chosen, selection.catalog):
        causes: dict[tuple[str, str], list[str]] = {}
        for each in _all_rejections(best, host_classes, pythons, requirements):
            same_class = next(names for names in host_classes.values() if each.host in names)
            causes.setdefault((each.cause, each.lifted_by), []).extend(same_class)
        for (reason, lifted_by), names in causes.items():
            if lifted_by:
                yield f"PyTorch {chosen} is not the newest: {joined(sorted(names))}: {reason}; what lifts it: {lifted_by}"
        if not causes:
            inside = " and ".join(_nccls(best, selection.fitting[best]))
            yield f"PyTorch {chosen} is not the newest: the builds of {best} for these hosts have NCCL {inside} inside: ranks need the same"
    cause = "requested" if requirements.torch_version else "no other fits"
    for problem in selection.catalog.known_bad("pytorch", chosen):
        yield f"PyTorch {chosen} is known bad ({'an earlier run chose it' if 'torch' in requirements.kept else cause}): {problem}"


def _rejected_releases(selection: _Selection) -> Iterator[Rejected]:
    """The releases that do not fit, those with several NCCLs, and those that are older."""
    chosen, older = selection.version, False
    for version, rejection in selection.rejections.items():
        bad = selection.catalog.known_bad("pytorch", version)
        if older:
            newer = key(version) > key(chosen)
            why = "newer than the catalogue's default, which fits every host" if newer else f"older than {chosen}, which fits every host"
            yield Rejected(f"torch=={version}", why)
        elif version == chosen:
            older = True
        elif not rejection and bad:
            yield Rejected(f"torch=={version}", f"known bad: {bad[0]}")
        elif rejection:
            yield replace(rejection, cause=f"{rejection.host}: {rejection.cause}")
        else:
            inside = ", ".join(_nccls(version, selection.fitting[version]))
            yield Rejected(f"torch=={version}", f"its builds for these hosts have different NCCLs ({inside}): ranks need the same")


def _tags(version: str, host_class: HostClass, requirements: Requirements) -> list[str]:
    """The tags of the builds that a host class can use, best first: ``cpu``, or ``cu126``, … or ``rocm7.2``, …; empty if there is none.

    Best is: chosen by an earlier run; of the driver's CUDA major; without weak evidence; run natively (largest first) and not by
    minor-version compatibility (smallest first); for AMD's GPUs after those without weak evidence the newest ROCm. Of a release that the
    catalogue does not know: those of available wheels, else ``cpu``.
    """
    release = requirements.catalog.pytorch().releases.get(version)
    if release and host_class.cuda is None and host_class.lacks_libc(release.libc):
        return []
    if not host_class.uses_gpus:
        return [CPU]
    vendor = ROCM if host_class.targets else CUDA
    if release is None:
        named = re.compile(rf"torch-{re.escape(version)}\+({vendor}\d[\d.]*)-")
        tags = {found[1] for each in (*requirements.files, *host_class.torch_wheels) if (found := named.match(each))}
        if host_class.cuda is None:
            return sorted(tags, key=key, reverse=True) or [CPU]
        return sorted((tag for tag in tags if host_class.runs(_cuda(tag))), key=lambda tag: key(_cuda(tag)), reverse=True) or [CPU]
    if host_class.cuda is None:
        known = requirements.catalog.pytorch().rocm.of
        newest_first = sorted((each for each in release.rocm if not _misfit(each, host_class)), key=key, reverse=True)
        by_evidence = sorted(newest_first, key=lambda each: (not _kept(version, ROCM + each, host_class), known[each].weak is not None))
        return [ROCM + each for each in by_evidence]
    major = key(host_class.cuda)[0]

    def cost(cuda: str) -> tuple[bool, bool, bool, bool, tuple[int, ...]]:
        native = host_class.runs_natively(cuda)
        size = tuple(-part if native else part for part in key(cuda))
        return not _kept(version, _tag(cuda), host_class), key(cuda)[0] != major, release.builds[cuda].weak is not None, not native, size

    usable = [
        cuda
        for cuda, build in release.builds.items()
        if host_class.runs(cuda)
        and not host_class.lacks_libc(build.libc or release.libc)
        and _has_code(build.code.get(host_class.arch), host_class, ptx=host_class.runs_natively(cuda))
    ]
    return [_tag(cuda) for cuda in sorted(usable, key=cost)]


def _has_code(compiled: Iterable[str] | None, host_class: HostClass, *, ptx: bool = True) -> bool:
    """Whether code that was compiled for these runs on all GPUs of a host class; ``ptx``: the driver compiles PTX, too."""
    return compiled is not None and not host_class.gpus_without_code(each if ptx else each.removesuffix("+PTX") for each in compiled)


def _kept(version: str, tag: str, host_class: HostClass) -> bool:
    return any(package == f"torch=={version}+{tag}" for package, _cuda in host_class.kept_builds)


def _with_same_nccl(version: str, host_classes: HostClasses, requirements: Requirements) -> Tags:
    """The best builds. Each has its own NCCL inside, and ranks with different ones refuse each other: if these differ and one build fits
    all hosts with GPUs of a vendor, all these get that one."""
    usable = {host_class: _tags(version, host_class, requirements) or [CPU] for host_class in host_classes}
    best = {host_class: tags[0] for host_class, tags in usable.items()}
    for vendor in (CUDA, ROCM):
        of_vendor = {host_class: tag for host_class, tag in best.items() if tag.startswith(vendor)}
        if len(_nccls(version, of_vendor)) > 1 and (common := set.intersection(*(set(usable[each]) for each in of_vendor))):
            best |= dict.fromkeys(of_vendor, max(common, key=lambda tag: key(tag.removeprefix(ROCM) if vendor == ROCM else _cuda(tag))))
    return best


def _rejected_builds(version: str, chosen: str, host_class: HostClass) -> Iterator[Rejected]:
    """The other builds of the chosen release."""
    release = host_class.catalog.pytorch().releases.get(version)
    for cuda, build in release.builds.items() if release else ():
        if _tag(cuda) == chosen:
            continue
        if host_class.cuda is None:
            cause = host_class.cuda_why
        elif not host_class.runs(cuda):
            cause = f"newer than the driver's CUDA {host_class.cuda}"
        elif release and host_class.lacks_libc(build.libc or release.libc):
            cause = f"it needs a newer glibc than {host_class.libc}"
        elif not _has_code(build.code.get(host_class.arch), host_class, ptx=host_class.runs_natively(cuda)):
            cause = f"it has no code for compute capability {', '.join(host_class.capabilities)} on {host_class.arch}"
        elif _kept(version, chosen, host_class):
            cause = "an earlier run chose another build of it"
        elif build.weak:
            cause = f"weak evidence: {build.weak}"
        else:
            cause = f"{chosen} fits the driver better, or fits the other hosts, too: ranks need the same NCCL inside"
        yield Rejected(f"torch=={version}+{_tag(cuda)}", cause)
    for rocm in release.rocm if release and host_class.targets else ():
        if ROCM + rocm != chosen:
            weak, misfit = host_class.catalog.pytorch().rocm.of[rocm].weak, _misfit(rocm, host_class)
            cause = misfit.cause if misfit else f"weak evidence: {weak}" if weak else f"{chosen} is newer, or an earlier run chose it"
            yield Rejected(f"torch=={version}+{ROCM}{rocm}", cause)


def _nccls(version: str, tags: Tags) -> dict[str, HostClass]:
    """The NCCLs inside these builds, each with a host class that gets it; the RCCLs where those differ."""
    inside: dict[str, dict[str, HostClass]] = {CUDA: {}, ROCM: {}}
    for host_class, tag in tags.items():
        build = _build(version, tag, host_class.catalog)
        library = build.rccl if isinstance(build, RocmBuild) else build.nccl if build else None
        if tag != CPU:
            inside[ROCM if tag.startswith(ROCM) else CUDA][library or f"of {tag}"] = host_class
    return max(inside.values(), key=len)


def _tag(cuda: str) -> str:
    return "cu" + cuda.replace(".", "")


def _cuda(tag: str) -> str:
    return f"{tag[2:-1]}.{tag[-1]}"


def _component(
    version: str, tag: str, host_class: HostClass, python: Interpreter, requirements: Requirements, rejected: tuple[Rejected, ...]
) -> Wheel:
    known = requirements.catalog.pytorch()
    exact = f"{version}+{tag}"
    cuda = _cuda(tag) if tag.startswith(CUDA) else None
    rocm = _build(version, tag, host_class.catalog) if tag.startswith(ROCM) else None
    place, code = known.index, tuple[str, ...]()
    if isinstance(rocm, RocmBuild):
        driver = f"amdgpu {host_class.amdgpu} runs build {tag}" if host_class.amdgpu else f"build {tag}; the driver is the kernel's own"
        why = [driver, f"it has code for {', '.join(host_class.targets)}, and its own ROCm inside"]
        place = rocm.index or place
        if rocm.device:
            code = tuple(f"{rocm.device.format(target=each)}=={exact}" for each in host_class.targets)
    elif cuda:
        why = [f"{host_class.cuda_why}, which runs build {tag}"]
        if key(cuda) > key(host_class.cuda or "0"):
            limit = "runs builds of the same major, without newer PTX"
            why.append(f"by minor-version compatibility: a driver for CUDA {host_class.cuda} {limit}")
        if host_class.capabilities:
            why.append(f"it has code for compute capability {', '.join(host_class.capabilities)}")
    elif not host_class.uses_gpus:
        why = [f"the CPU build: {host_class.cuda_why}"]
    else:
        why = [f"whichever build the index has: the catalogue knows none of PyTorch {version} that runs here"]
    if default := _default(version, host_class.catalog):
        why.append(f"{version}: {default.why}")
    if (build := _build(version, tag, host_class.catalog)) and build.weak:
        why.append(f"weak evidence: {build.weak}")
    source: Literal["index", "folder", "host"] = "index"
    index, sha256 = None, None
    file = _file_of(exact, python.minor, host_class.arch, requirements.files)
    if file:
        source, sha256 = "folder", None if file in requirements.wheels else dict(requirements.wheels_kept)[file]
        why.append("the wheel is in the given wheel folder" if sha256 is None else f"{file}, which an earlier run was given")
    elif _file_of(exact, python.minor, host_class.arch, host_class.torch_wheels):
        source = "host"
        why.append("the wheel is in a wheel folder from the settings of the host's pip")
    elif requirements.torch_index:
        index, exact = requirements.torch_index, exact if isinstance(rocm, RocmBuild) else version  # a release alone may be CUDA's
        why.append("from the requested index")
    else:
        index = place.format(tag=tag)
        why.append(f"from {'the PyTorch project' if place == known.index else 'AMD'}'s index for this build")
    return Wheel(exact, f"torch=={exact}", source, tuple(why), rejected, index, file, sha256, cuda, code)


def _file_of(version: str, python: str, arch: str, wheels: Iterable[str]) -> str | None:
    """The wheel among these that is this build of PyTorch, for this Python and architecture."""
    wanted = ["torch", version, "cp" + python.replace(".", "")]
    named = ((wheel, wheel.removesuffix(".whl").split("-")) for wheel in wheels)
    return next((wheel for wheel, parts in named if len(parts) >= 5 and parts[:3] == wanted and parts[-1].endswith(arch)), None)


def _proposals(host: str, host_classes: HostClasses, requirements: Requirements) -> Iterator[Proposal]:
    """Cheapest first: fewer options, another Python, fewer hosts, a newer driver, no PyTorch."""
    host_class, names = next((host_class, names) for host_class, names in host_classes.items() if host in names)
    if requirements.torch_version:
        yield change_requirements("leave --torch out: the plan finds one that fits", torch_version=None)
        yield change_requirements("--index-url torch=URL of an index that has it", torch_index="https://index.example/simple")
    pythons = {python for release in requirements.catalog.pytorch().releases.values() for python in release.pythons}
    yield from other_pythons(host_class, names, pythons)
    yield exclude(names)
    for number in range(1, len(host_class.capabilities)):
        dropped, left = host_class.capabilities[:number], host_class.capabilities[number:]
        text = f"leave the GPUs of compute capability {joined(dropped)} of {joined(names)} out: a container with the others alone as host"
        yield change_classes(text, {host_class: replace(host_class, capabilities=left)}, "gpus")
    if host_class.targets:
        for driver in sorted({each.driver for each in requirements.catalog.pytorch().rocm.of.values()}, key=key):
            if host_class.amdgpu and key(host_class.amdgpu) < key(driver):
                newer = {host_class: replace(host_class, amdgpu=driver)}
                yield change_classes(f"update the driver amdgpu of {joined(names)} to {driver} or newer", newer, "driver")
    else:
        yield from newer_drivers(host_class, host_classes)
    yield CPU_ONLY
    yield change_requirements("--torch none: Open MPI and the engine's NumPy side only", torch=False)
