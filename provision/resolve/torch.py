"""PyTorch: one release for all hosts; per host a build that its driver runs and that still holds code for its GPUs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from provision import catalog
from provision.base.versions import key, minor
from provision.plan.model import Rejected, Wheel
from provision.plan.requirements import Requirements
from provision.resolve.blocked import Attempt, Blocked, Kinds, ask, leave_out, newer_drivers, other_pythons
from provision.resolve.machine import Interpreter, Machine

CPU = "cpu"


def torch(kinds: Kinds, pythons: Mapping[Machine, Interpreter], requirements: Requirements) -> tuple[dict[Machine, Wheel], list[str]]:
    """(PyTorch for every kind of host, notes). Raises Blocked with the host that no release fits."""
    misfits = {version: _misfit(version, kinds, pythons, requirements) for version in _candidates(requirements)}
    fitting = {
        version: _same_nccl(version, {kind: next(iter(_tags(version, kind, requirements)), CPU) for kind in kinds}, requirements)
        for version, misfit in misfits.items()
        if misfit is None
    }
    if not fitting:
        # What tells the user most: that there is no build at all, before that there is no wheel for a Python.
        found = min((misfit for misfit in misfits.values() if misfit), key=lambda each: each.is_of_python)
        raise Blocked(found.host, found.reason, _attempts(found.host, kinds, requirements))
    version = next((each for each, tags in fitting.items() if len(_nccls(each, tags)) <= 1), next(iter(fitting)))
    rejected = tuple(_lost(version, fitting, misfits))
    tags = fitting[version]
    made = {
        kind: _component(version, tags[kind], kind, pythons[kind], requirements, (*_other_builds(version, tags[kind], kind), *rejected))
        for kind in kinds
    }
    return made, _notes(version, kinds, tags)


def _lost(chosen: str, fitting: Mapping[str, Mapping[Machine, str]], misfits: Mapping[str, _Misfit | None]) -> Iterator[Rejected]:
    """The releases that were not taken: those that do not fit, those that bring several NCCLs, those that are older."""
    order = list(misfits)
    for version in order[: order.index(chosen)]:
        misfit = misfits[version]
        inside = ", ".join(_nccls(version, fitting.get(version, {})))
        said = (
            f"{misfit.host}: {misfit.reason}"
            if misfit
            else f"its builds for these hosts bring different NCCLs ({inside}): ranks need the same"
        )
        yield Rejected(f"torch=={version}", said)
    for version in order[order.index(chosen) + 1 :]:
        yield Rejected(f"torch=={version}", f"older than {chosen}, which fits every host")


def pythons(requirements: Requirements) -> list[str]:
    """The Pythons that the best release has wheels for; empty when the catalogue does not know it."""
    release = catalog.pytorch().releases.get(_candidates(requirements)[0])
    return list(release.pythons) if release else []


def _candidates(requirements: Requirements) -> list[str]:
    """Releases, best first."""
    if requirements.torch_version:
        return [requirements.torch_version]
    known = catalog.pytorch()
    return [known.default, *sorted((v for v in known.releases if v != known.default), key=key, reverse=True)]


class _Misfit(NamedTuple):
    """Why a release does not fit a host."""

    host: str
    reason: str
    is_of_python: bool


def _misfit(
    version: str, kinds: Mapping[Machine, list[str]], pythons: Mapping[Machine, Interpreter], requirements: Requirements
) -> _Misfit | None:
    """Of the first host by name that the release does not fit."""
    if requirements.torch_index and requirements.torch_version:
        return None  # the user says that it is there
    release = catalog.pytorch().releases.get(version)
    found = []
    for kind, names in kinds.items():
        python = minor(pythons[kind].version)
        if release is None:
            given = f"{version}+{_tags(version, kind, requirements)[0]}"
            there = _there(given, python, kind.arch, (*requirements.files, *kind.torch_wheels))
            reason = None if there else f"the catalogue does not know PyTorch {version}"
        elif python not in release.pythons:
            reason = f"PyTorch {version} has no wheel for Python {python}"
        else:
            reason = None if _tags(version, kind, requirements) else _no_build(version, kind)
        if reason:
            found.append(_Misfit(names[0], reason, release is not None and python not in release.pythons))
    return min(found, default=None)


def _no_build(version: str, kind: Machine) -> str:
    builds = catalog.pytorch().releases[version].builds
    if any(_runs_on_driver(cuda, kind) for cuda in builds):
        gpus = ", ".join(kind.capabilities)
        return f"no build of PyTorch {version} that a driver for CUDA {kind.cuda} runs has code for compute capability {gpus}"
    return f"no build of PyTorch {version} runs on a driver for CUDA {kind.cuda}"


def _tags(version: str, kind: Machine, requirements: Requirements) -> list[str]:
    """The tags of the builds that this kind of host can use, best first: ``cpu``, or ``cu126``, …; empty when there is none.

    Best is: taken by an earlier run; of the driver's CUDA major, sure, run natively (largest first) and not by minor-version compatibility
    (smallest first).
    Of a release that the catalogue does not know: what the names of wheels say that are there, else ``cpu``.
    """
    if kind.cuda is None:
        return [CPU]
    release = catalog.pytorch().releases.get(version)
    if release is None:
        named = re.findall(
            rf"^torch-{re.escape(version)}\+(cu\d{{3}})-", "\n".join((*requirements.files, *kind.torch_wheels)), re.MULTILINE
        )
        return sorted((tag for tag in set(named) if _runs_on_driver(_dotted(tag), kind)), key=_cuda, reverse=True) or [CPU]
    limit = key(kind.cuda)

    def cost(cuda: str) -> tuple[Any, ...]:
        native = key(cuda) <= limit
        size = tuple(-part if native else part for part in key(cuda))
        return not _kept(version, _tag(cuda), kind), key(cuda)[0] != limit[0], release.builds[cuda].weak is not None, not native, size

    usable = [cuda for cuda, build in release.builds.items() if _runs_on_driver(cuda, kind) and _has_code(build.code(kind.arch), kind)]
    return [_tag(cuda) for cuda in sorted(usable, key=cost)]


def _kept(version: str, tag: str, kind: Machine) -> bool:
    return any(package == f"torch=={version}+{tag}" for package, _cuda in kind.builds)


def _runs_on_driver(cuda: str, kind: Machine) -> bool:
    if kind.cuda is None:
        return False
    if key(cuda) <= key(kind.cuda):
        return True
    oldest = catalog.cuda().minor_compatibility.drivers.get(cuda.split(".")[0])
    same_major = key(cuda)[0] == key(kind.cuda)[0]
    return same_major and bool(oldest) and (kind.driver is None or key(kind.driver) >= key(oldest))


def _has_code(compiled: Sequence[str] | None, kind: Machine) -> bool:
    """Whether a build runs on all GPUs: code for the same major and no newer minor, or PTX for an older one."""
    return compiled is not None and not kind.without_code(compiled)


def _same_nccl(version: str, tags: dict[Machine, str], requirements: Requirements) -> dict[Machine, str]:
    """Each build brings its own NCCL, and ranks with different ones refuse each other: where one build fits all GPU hosts, it is that."""
    gpus = {kind: tag for kind, tag in tags.items() if tag != CPU}
    if len(_nccls(version, tags)) <= 1:
        return tags
    usable = [_tags(version, kind, requirements) for kind in gpus]
    common = [tag for tag in usable[0] if all(tag in each for each in usable)]
    if not common:
        return tags
    largest = max(common, key=_cuda)
    return {kind: tag if tag == CPU else largest for kind, tag in tags.items()}


def _other_builds(version: str, chosen: str, kind: Machine) -> Iterator[Rejected]:
    """The builds of this release that this kind of host does not get, and why."""
    release = catalog.pytorch().releases.get(version)
    for cuda, build in release.builds.items() if release else ():
        if _tag(cuda) == chosen:
            continue
        if kind.cuda is None:
            reason = kind.cuda_why
        elif not _runs_on_driver(cuda, kind):
            reason = f"newer than the driver's CUDA {kind.cuda}"
        elif not _has_code(build.code(kind.arch), kind):
            reason = f"it has no code for compute capability {', '.join(kind.capabilities)} on {kind.arch}"
        elif _kept(version, chosen, kind):
            reason = "an earlier run took another build of it"
        elif build.weak:
            reason = f"weak: {build.weak}"
        else:
            reason = f"{chosen} fits the driver better, or fits the other hosts, too: ranks need the same NCCL inside"
        yield Rejected(f"torch=={version}+{_tag(cuda)}", reason)


def _notes(version: str, kinds: Mapping[Machine, list[str]], tags: Mapping[Machine, str]) -> list[str]:
    inside = _nccls(version, tags)
    if len(inside) <= 1:
        return []
    listed = ", ".join(f"{tags[kind]} on {kinds[kind][0]} {nccl}" for nccl, kind in inside.items())
    return [
        f"PyTorch {version} brings different NCCLs ({listed}) and no one build runs everywhere: its own NCCL backend will refuse to work "
        "across these hosts"
    ]


def _nccls(version: str, tags: Mapping[Machine, str]) -> dict[str, Machine]:
    """The NCCLs inside these builds, each with a kind of host that gets it."""
    return {_nccl_inside(version, tag): kind for kind, tag in tags.items() if tag != CPU}


def _nccl_inside(version: str, tag: str) -> str:
    release = catalog.pytorch().releases.get(version)
    inside = release.builds[_dotted(tag)].nccl if release else None
    return inside or f"of {tag}"


def _tag(cuda: str) -> str:
    return "cu" + cuda.replace(".", "")


def _dotted(tag: str) -> str:
    return f"{tag[2:-1]}.{tag[-1]}"


def _cuda(tag: str) -> tuple[int, ...]:
    return key(_dotted(tag))


def _component(
    version: str, tag: str, kind: Machine, python: Interpreter, requirements: Requirements, rejected: tuple[Rejected, ...]
) -> Wheel:
    known = catalog.pytorch()
    exact = f"{version}+{tag}"
    cuda = None if tag == CPU else _dotted(tag)
    if tag != CPU:
        why = [f"{kind.cuda_why}, which runs build {tag}"]
    elif kind.cuda is None:
        why = [f"the CPU build: {kind.cuda_why}"]
    else:
        why = [f"whichever build the index has: the catalogue knows none of PyTorch {version} that runs here"]
    if cuda and key(cuda) > key(kind.cuda or "0"):
        why.append(f"by minor-version compatibility: a driver for CUDA {kind.cuda} runs builds of the same major, without newer PTX")
    if cuda and kind.capabilities:
        why.append(f"it has code for compute capability {', '.join(kind.capabilities)}")
    build = known.releases[version].builds.get(cuda or "") if version in known.releases else None
    if build and build.weak:
        why.append(f"weak: {build.weak}")
    source: Literal["index", "folder", "host"]
    index, sha256 = None, None
    file = _there(exact, minor(python.version), kind.arch, requirements.files)
    if file:
        source, sha256 = "folder", None if file in requirements.wheels else dict(requirements.wheels_kept)[file]
        why.append("the wheel is in the wheel folder that was given" if sha256 is None else f"{file}, which an earlier run was given")
    elif _there(exact, minor(python.version), kind.arch, kind.torch_wheels):
        source = "host"
        why.append("the wheel is in a wheel folder that the host's pip knows")
    elif requirements.torch_index:
        source, index, exact = "index", requirements.torch_index, version
        why.append("the index that was asked for")
    else:
        source, index = "index", known.index.format(tag=tag)
        why.append("from the PyTorch project's index for this build")
    return Wheel(exact, f"torch=={exact}", source, tuple(why), rejected, index=index, cuda=cuda, file=file, sha256=sha256)


def _there(version: str, python: str, arch: str, wheels: Iterable[str]) -> str | None:
    """The wheel among these that is this build of PyTorch, for this Python and architecture."""
    wanted = ["torch", version, "cp" + python.replace(".", "")]
    named = ((wheel, wheel.removesuffix(".whl").split("-")) for wheel in wheels)
    return next((wheel for wheel, parts in named if len(parts) >= 5 and parts[:3] == wanted and parts[-1].endswith(arch)), None)


def _attempts(host: str, kinds: Kinds, requirements: Requirements) -> Iterator[Attempt]:
    """Cheapest first: an option less, another Python, hosts less, a newer driver, no PyTorch."""
    kind, names = next((kind, names) for kind, names in kinds.items() if host in names)
    if requirements.torch_version:
        yield ask("leave --torch out: the plan finds one that fits", torch_version=None)
        yield ask("--torch-index URL of an index that has it", torch_index="https://index.example/simple")
    known = catalog.pytorch().releases.values()
    yield from other_pythons(kind, names, {python for release in known for python in release.pythons})
    yield leave_out(names)
    yield from newer_drivers(kind, names)
    yield ask("--without-torch: Open MPI and the engine's NumPy side only", torch=False)
