"""Python: one version for all hosts if all can have it, else each its own; and the wheels of the environment besides PyTorch and MPI."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from provision.base.text import grouped, joined
from provision.base.versions import key
from provision.catalog import Catalog
from provision.plan.model import ManagedPython, Preinstalled, Rejected, SystemPackages, Wheel
from provision.plan.requirements import Requirements
from provision.resolve.host_classes import HostClass, HostClasses, Interpreter


def candidates(
    host_classes: HostClasses, preferred: Sequence[Collection[str]], requirements: Requirements
) -> Iterator[dict[HostClass, Interpreter]]:
    """Choices of an interpreter for each host class, those that change least first; those in which uv downloads Pythons, where it may,
    come last. For each of ``preferred`` (3.11, …) there is one in which every host has one of these, if it can have any."""
    others = {each: [python for python in each.other_pythons if not python.from_uv] for each in host_classes}
    yield from _choices(host_classes, others, preferred, requirements.catalog)
    if requirements.python_downloads:
        yield from _choices(host_classes, {each: each.other_pythons for each in host_classes}, preferred, requirements.catalog)


def _choices(
    host_classes: HostClasses, others: Mapping[HostClass, Sequence[Interpreter]], preferred: Sequence[Collection[str]], catalog: Catalog
) -> Iterator[dict[HostClass, Interpreter]]:
    """The hosts' own if they agree; a version that all can have, for which the fewest hosts download one, then the fewest install one, then
    the fewest change, the usual one first, then the newest; each its own; each its own if it is one of ``preferred``, else another of
    these."""
    own = {host_class: host_class.python for host_class in host_classes}
    versions = {python.minor for python in own.values()}
    agree = len(versions) == 1
    if agree:
        yield own
    available = {each: {python.minor: python for python in (*reversed(others[each]), each.python)} for each in host_classes}
    common = set.intersection(*(set(found) for found in available.values())) & set(catalog.python_packages().numpy.of)

    usual = catalog.python_packages().usual.version  # most projects have wheels for it

    def cost(version: str) -> tuple[int, int, int, bool, tuple[int, ...]]:
        chosen = [(available[host_class][version], host_class, len(names)) for host_class, names in host_classes.items()]
        downloaded = sum(count for python, _host_class, count in chosen if python.from_uv)
        installed = sum(count for python, _host_class, count in chosen if python.packages)
        changed = sum(count for _python, host_class, count in chosen if host_class.python.minor != version)
        return downloaded, installed, changed, version != usual, tuple(-part for part in key(version))

    for version in sorted(common - (versions if agree else set()), key=cost):
        yield {host_class: found[version] for host_class, found in available.items()}
    if not agree:
        yield own
    for each in preferred:
        yield {host_class: _preferred(host_class, others[host_class], each) for host_class in host_classes}


def _preferred(host_class: HostClass, others: Sequence[Interpreter], preferred: Collection[str]) -> Interpreter:
    if host_class.python.minor in preferred:
        return host_class.python
    fitting, usual = (each for each in others if each.minor in preferred), host_class.catalog.python_packages().usual.version
    return max(
        fitting, key=lambda each: (not each.from_uv, not each.packages, each.minor == usual, key(each.version)), default=host_class.python
    )


def rejection(python: Interpreter, catalog: Catalog) -> Rejected | None:
    """Why this interpreter cannot be used with any other choice."""
    if not python.version:
        return Rejected("Python", "nothing is known of its Python, and the catalogue has none for its distribution", id="absent")
    if python.minor not in catalog.python_packages().numpy.of:
        return Rejected(f"Python {python.minor}", f"the catalogue has no NumPy for Python {python.minor}", id="python")
    return None


def notes(host_classes: HostClasses, pythons: Mapping[HostClass, Interpreter]) -> list[str]:
    """What to know where hosts have different Pythons, or one that uv downloads."""
    found = []
    versions = grouped((python.minor, name) for each, python in pythons.items() for name in host_classes[each])
    if len(versions) > 1:
        listed = ", ".join(f"{joined(sorted(names))} {version}" for version, names in sorted(versions.items()))
        found.append(f"hosts have different Pythons ({listed}): each keeps its own; objects sent by pickle may not be readable everywhere")
    if downloaded := sorted(name for each, python in pythons.items() if python.from_uv for name in host_classes[each]):
        found.append(
            f"{joined(downloaded)}: uv downloads Python from python-build-standalone, so these hosts must reach GitHub, or a mirror that "
            "their /etc/uv/uv.toml names (python-install-mirror); else name a Python of the site (provision_python=PATH)"
        )
    return found


def component(
    host_class: HostClass, chosen: Interpreter, torch: Wheel | None, *, shared: bool
) -> SystemPackages | Preinstalled | ManagedPython:
    """The interpreter as a component; ``torch``: the PyTorch for it; ``shared``: all hosts have the same version."""
    version = torch.version.partition("+")[0] if torch else ""
    release = host_class.catalog.pytorch().releases.get(version)
    own = host_class.python.minor
    why = [chosen.why or "not the host's own Python, but one that all can have"]
    if chosen != host_class.python and release and own and own not in release.pythons:
        why = [f"PyTorch {version} has no wheel for the host's own Python {own}"]
    if chosen.from_uv:
        why.append("uv downloads it from python-build-standalone (on GitHub, or a mirror that the host's uv.toml names)")
    if chosen.packages:
        why.append(f"the distribution has it: {', '.join(chosen.packages)}")
    why.append("the same on every host" if shared else "the hosts have no Python in common")
    others = (each for each in (host_class.python, *host_class.other_pythons) if each != chosen and not each.from_uv)

    def cause(other: Interpreter) -> str:
        if release and other.minor not in release.pythons:
            return f"PyTorch {version} has no wheel for it"
        return "not needed: the host's own fits" if chosen == host_class.python else "not on every host, or more would change"

    rejected = tuple(Rejected(f"Python {each.version} ({each.path})", cause(each)) for each in others)
    if chosen.packages:
        return SystemPackages(chosen.version, chosen.path, "distribution", tuple(why), rejected, packages=chosen.packages)
    if chosen.from_uv:
        return ManagedPython(chosen.version, chosen.path, "uv", tuple(why), rejected)
    return Preinstalled(chosen.version, chosen.path, "host", tuple(why), rejected)


def wheels(host_class: HostClass, chosen: Interpreter) -> dict[str, Wheel]:
    """The catalogue's NumPy for the interpreter; one release of the others for every host, of which each architecture has wheels."""
    known = host_class.catalog.python_packages()
    found = {
        "cmake": (known.cmake.version, "the same on every host; the last 3.x still builds old projects"),
        "mpi4py": (known.mpi4py.version, "speaks the ABI of every Open MPI 4.x; finds the library at run time"),
        "numpy": (known.numpy.of[chosen.minor], f"the catalogue's release for Python {chosen.minor}"),
        "cloudpickle": (known.cloudpickle.version, "serialises the functions of Runner"),
    }
    packaged = " ".join(["the distribution's cmake", *host_class.offered("cmake")[:1]])
    rejected = {"cmake": (Rejected(packaged, "it differs from distribution to distribution"),)}
    return {name: Wheel(version, f"{name}=={version}", "wheel", (why,), rejected.get(name, ())) for name, (version, why) in found.items()}
