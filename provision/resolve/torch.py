"""PyTorch: one release for all hosts; per host a build that its driver runs and that still holds code for its GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from provision import catalog
from provision.plan import Component, Rejected, Source
from provision.resolve.blocked import Blocked, leave_out
from provision.resolve.machine import Interpreter, Machine, driver_for
from provision.resolve.wishes import Wishes
from provision.versions import key, minor

CPU = "cpu"


def torch(
    kinds: Mapping[Machine, list[str]], pythons: Mapping[Machine, Interpreter], wishes: Wishes
) -> tuple[dict[Machine, Component], list[str]]:
    """(PyTorch for every kind of host, notes). Raises Blocked with the host that no release fits."""
    misfits = {version: _misfit(version, kinds, pythons, wishes) for version in _candidates(wishes)}
    fitting = {
        version: _same_nccl(version, {kind: _tags(version, kind)[0] for kind in kinds})
        for version, misfit in misfits.items()
        if misfit is None
    }
    if not fitting:
        found = [misfit for misfit in misfits.values() if misfit]
        host, reason = min(found, key=lambda each: _cause(each[1]))
        raise Blocked(host, reason, *_ways_out(host, kinds, pythons, wishes))
    version = next((each for each, tags in fitting.items() if len(_nccls(each, tags)) <= 1), next(iter(fitting)))
    rejected = tuple(_lost(version, fitting, misfits))
    tags = fitting[version]
    made = {
        kind: _component(version, tags[kind], kind, pythons[kind], wishes, (*_other_builds(version, tags[kind], kind), *rejected))
        for kind in kinds
    }
    return made, _notes(version, kinds, tags)


def _lost(chosen: str, fitting: Mapping[str, Mapping[Machine, str]], misfits: Mapping[str, tuple[str, str] | None]) -> Iterator[Rejected]:
    """The releases that were not taken: those that do not fit, those that bring several NCCLs, those that are older."""
    order = list(misfits)
    for version in order[: order.index(chosen)]:
        misfit = misfits[version]
        inside = ", ".join(_nccls(version, fitting.get(version, {})))
        said = (
            f"{misfit[0]}: {misfit[1]}" if misfit else f"its builds for these hosts bring different NCCLs ({inside}): ranks need the same"
        )
        yield Rejected(f"torch=={version}", said)
    for version in order[order.index(chosen) + 1 :]:
        yield Rejected(f"torch=={version}", f"older than {chosen}, which fits every host")


def pythons(wishes: Wishes) -> list[str]:
    """The Pythons that the best release has wheels for; empty when the catalogue does not know it."""
    release = catalog.load("pytorch")["releases"].get(_candidates(wishes)[0])
    return list(release["pythons"]) if release else []


def _candidates(wishes: Wishes) -> list[str]:
    """Releases, best first."""
    if wishes.torch_version:
        return [wishes.torch_version]
    known = catalog.load("pytorch")
    return [known["default"], *sorted((v for v in known["releases"] if v != known["default"]), key=key, reverse=True)]


def _misfit(
    version: str, kinds: Mapping[Machine, list[str]], pythons: Mapping[Machine, Interpreter], wishes: Wishes
) -> tuple[str, str] | None:
    """(host, why this release does not fit it), of the first host by name."""
    if wishes.torch_index and wishes.torch_version:
        return None  # the user says that it is there
    release = catalog.load("pytorch")["releases"].get(version)
    found = []
    for kind, names in kinds.items():
        python = minor(pythons[kind].version)
        if release is None:
            reason = f"the catalogue does not know PyTorch {version}" if kind.cuda else None
        elif python not in release["pythons"]:
            reason = f"PyTorch {version} has no wheel for Python {python}"
        else:
            reason = None if _tags(version, kind) else _no_build(version, kind)
        if reason:
            found.append((names[0], reason))
    return min(found, default=None)


def _no_build(version: str, kind: Machine) -> str:
    builds = catalog.load("pytorch")["releases"][version]["builds"]
    if any(_runs_on_driver(cuda, kind) for cuda in builds):
        gpus = ", ".join(kind.capabilities)
        return f"no build of PyTorch {version} that a driver for CUDA {kind.cuda} runs has code for compute capability {gpus}"
    return f"no build of PyTorch {version} runs on a driver for CUDA {kind.cuda}"


def _tags(version: str, kind: Machine) -> list[str]:
    """The tags of the builds that this kind of host can use, best first: ``cpu``, or ``cu126``, …; empty when there is none.

    Best is: of the driver's CUDA major, sure, run natively (largest first) and not by minor-version compatibility (smallest first).
    """
    if kind.cuda is None:
        return [CPU]
    release = catalog.load("pytorch")["releases"].get(version)
    if release is None:
        return [CPU]
    limit = key(kind.cuda)

    def cost(cuda: str) -> tuple[Any, ...]:
        native = key(cuda) <= limit
        size = tuple(-part if native else part for part in key(cuda))
        return key(cuda)[0] != limit[0], "weak" in release["builds"][cuda], not native, size

    usable = [cuda for cuda, build in release["builds"].items() if _runs_on_driver(cuda, kind) and _has_code(build.get(kind.arch), kind)]
    return [_tag(cuda) for cuda in sorted(usable, key=cost)]


def _runs_on_driver(cuda: str, kind: Machine) -> bool:
    if kind.cuda is None:
        return False
    if key(cuda) <= key(kind.cuda):
        return True
    oldest = catalog.load("cuda")["minor_compatibility"]["drivers"].get(cuda.split(".")[0])
    same_major = key(cuda)[0] == key(kind.cuda)[0]
    return same_major and bool(oldest) and (kind.driver is None or key(kind.driver) >= key(oldest))


def _has_code(compiled: list[str] | None, kind: Machine) -> bool:
    """Whether a build runs on all GPUs: code for the same major and no newer minor, or PTX for an older one."""
    if compiled is None:
        return False

    def runs(capability: str) -> bool:
        gpu = key(capability)
        return any(key(each) <= gpu and (key(each)[0] == gpu[0] or each.endswith("+PTX")) for each in compiled)

    return all(runs(capability) for capability in kind.capabilities)


def _same_nccl(version: str, tags: dict[Machine, str]) -> dict[Machine, str]:
    """Each build brings its own NCCL, and ranks with different ones refuse each other: where one build fits all GPU hosts, it is that."""
    gpus = {kind: tag for kind, tag in tags.items() if tag != CPU}
    if len(_nccls(version, tags)) <= 1:
        return tags
    usable = [_tags(version, kind) for kind in gpus]
    common = [tag for tag in usable[0] if all(tag in each for each in usable)]
    if not common:
        return tags
    largest = max(common, key=_cuda)
    return {kind: tag if tag == CPU else largest for kind, tag in tags.items()}


def _other_builds(version: str, chosen: str, kind: Machine) -> Iterator[Rejected]:
    """The builds of this release that this kind of host does not get, and why."""
    release = catalog.load("pytorch")["releases"].get(version)
    for cuda, build in release["builds"].items() if release else ():
        if _tag(cuda) == chosen:
            continue
        if kind.cuda is None:
            reason = kind.cuda_why
        elif not _runs_on_driver(cuda, kind):
            reason = f"newer than the driver's CUDA {kind.cuda}"
        elif not _has_code(build.get(kind.arch), kind):
            reason = f"it has no code for compute capability {', '.join(kind.capabilities)} on {kind.arch}"
        elif "weak" in build:
            reason = f"weak: {build['weak']}"
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
    release = catalog.load("pytorch")["releases"].get(version)
    inside = release["builds"][_dotted(tag)]["nccl"] if release and tag != CPU else None
    return inside or f"of {tag}"


def _tag(cuda: str) -> str:
    return "cu" + cuda.replace(".", "")


def _dotted(tag: str) -> str:
    return f"{tag[2:-1]}.{tag[-1]}"


def _cuda(tag: str) -> tuple[int, ...]:
    return key(_dotted(tag))


def _component(version: str, tag: str, kind: Machine, python: Interpreter, wishes: Wishes, rejected: tuple[Rejected, ...]) -> Component:
    known = catalog.load("pytorch")
    exact = f"{version}+{tag}"
    cuda = None if tag == CPU else _dotted(tag)
    why = [f"the CPU build: {kind.cuda_why}" if tag == CPU else f"{kind.cuda_why}, which runs build {tag}"]
    if cuda and key(cuda) > key(kind.cuda or "0"):
        why.append(f"by minor-version compatibility: a driver for CUDA {kind.cuda} runs builds of the same major, without newer PTX")
    if cuda and kind.capabilities:
        why.append(f"it has code for compute capability {', '.join(kind.capabilities)}")
    weak = known["releases"].get(version, {}).get("builds", {}).get(cuda, {}).get("weak")
    if weak:
        why.append(f"weak: {weak}")
    source: Source
    index = None

    def among(wheels: tuple[str, ...]) -> bool:
        return any(_wheel_fits(wheel, exact, minor(python.version), kind.arch) for wheel in wheels)

    if among(wishes.wheels):
        source = "folder"
        why.append("the wheel is in the wheel folder that was given")
    elif among(kind.torch_wheels):
        source = "host"
        why.append("the wheel is in a wheel folder that the host's pip knows")
    elif wishes.torch_index:
        source, index, exact = "index", wishes.torch_index, version
        why.append("the index that was asked for")
    else:
        source, index = "index", known["index"].format(tag=tag)
        why.append("from the PyTorch project's index for this build")
    return Component(exact, f"torch=={exact}", source, tuple(why), rejected, index=index, cuda=cuda)


def _wheel_fits(wheel: str, version: str, python: str, arch: str) -> bool:
    parts = wheel.removesuffix(".whl").split("-")
    tag = "cp" + python.replace(".", "")
    return len(parts) >= 5 and parts[0] == "torch" and parts[1] == version and parts[2] == tag and parts[-1].endswith(arch)


def _cause(reason: str) -> int:
    """Which of several releases' reasons tells the user most: no build at all before no wheel for a Python."""
    return "no wheel for" in reason


def _ways_out(host: str, kinds: Mapping[Machine, list[str]], pythons: Mapping[Machine, Interpreter], wishes: Wishes) -> list[str]:
    kind, names = next((kind, names) for kind, names in kinds.items() if host in names)
    ways = []
    if wishes.torch_version:
        ways += ["leave --torch out: the plan finds one that fits", "--torch-index URL of an index that has it"]
    supported = {python for release in catalog.load("pytorch")["releases"].values() for python in release["pythons"]}
    if minor(pythons[kind].version) not in supported:
        ways.append(f"provision_python=/path/to/another/python in the inventory ({', '.join(sorted(supported, key=key))})")
    ways.append(leave_out(names))
    for cuda in sorted(catalog.load("cuda")["toolkits"]["drivers"], key=key):
        if kind.cuda is None or key(cuda) <= key(kind.cuda):
            continue
        updated = replace(kind, cuda=cuda, driver=driver_for(cuda))
        then = {**{other: of for other, of in kinds.items() if other != kind}, updated: names}
        if any(_misfit(version, then, {**pythons, updated: pythons[kind]}, wishes) is None for version in _candidates(wishes)):
            ways.append(f"update the NVIDIA driver of {host} to {driver_for(cuda)} or newer (CUDA {cuda})")
            break
    ways.append("--without-torch: Open MPI and the engine's NumPy side only")
    return ways
