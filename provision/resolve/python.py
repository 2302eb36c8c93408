"""Python: one for all hosts where there is one that all can have; else each keeps its own."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from provision import catalog
from provision.base.versions import key, minor
from provision.plan.model import Preinstalled, Rejected, SystemPackages, Wheel
from provision.resolve.machine import Interpreter, Machine


def possible(kinds: Mapping[Machine, list[str]], liked: Collection[str]) -> Iterator[dict[Machine, Interpreter]]:
    """Every way to give each kind of host an interpreter, best first.

    All their own; the newest that all can have; each its own; each its own where that is one of ``liked`` (3.11, …), else another that is.
    """
    own = {kind: kind.python for kind in kinds}
    agree = len({_minor(python) for python in own.values()}) == 1
    if agree:
        yield own
    available = {kind: {_minor(each): each for each in (*reversed(kind.others), kind.python)} for kind in kinds}
    common = set.intersection(*(set(found) for found in available.values())) - ({_minor(kind.python) for kind in kinds} if agree else set())

    def cost(version: str) -> tuple[int, tuple[int, ...]]:
        moved = sum(len(names) for kind, names in kinds.items() if _minor(kind.python) != version)
        return moved, tuple(-part for part in key(version))

    for version in sorted((version for version in common if version in _numpy()), key=cost):
        yield {kind: found[version] for kind, found in available.items()}
    if not agree:
        yield own
        yield {
            kind: kind.python
            if _minor(kind.python) in liked
            else max((each for each in kind.others if _minor(each) in liked), key=_newest, default=kind.python)
            for kind in kinds
        }


def misfit(python: Interpreter) -> str | None:
    """Why this interpreter cannot be used, whatever else is chosen."""
    if not python.version:
        return "nothing is known of its Python, and the catalogue has none for its distribution"
    if minor(python.version) not in _numpy():
        return f"the catalogue has no NumPy for Python {minor(python.version)}"
    return None


def python(kind: Machine, chosen: Interpreter, *, shared: bool) -> SystemPackages | Preinstalled:
    """The interpreter as a component; ``shared`` says that all hosts have the same."""
    why = [chosen.why or "not the host's own Python, but one that all can have"]
    if chosen.packages:
        why.append(f"the distribution has it: {', '.join(chosen.packages)}")
    why.append("the same on every host" if shared else "the hosts have no Python in common")
    reason = "not needed: the host's own fits" if chosen == kind.python else "not on every host"
    lost = tuple(Rejected(f"Python {each.version} ({each.path})", reason) for each in (kind.python, *kind.others) if each != chosen)
    if chosen.packages:
        return SystemPackages(chosen.version, chosen.path, "distribution", tuple(why), lost, packages=chosen.packages)
    return Preinstalled(chosen.version, chosen.path, "host", tuple(why), lost)


def numpy(chosen: Interpreter) -> Wheel:
    """NumPy for that interpreter."""
    version = _numpy()[minor(chosen.version)]
    return Wheel(version, f"numpy=={version}", "wheel", (f"the catalogue's release for Python {minor(chosen.version)}",))


def _newest(python: Interpreter) -> tuple[int, ...]:
    return key(python.version)


def _minor(python: Interpreter) -> str:
    return minor(python.version) if python.version else ""


def _numpy() -> dict[str, str]:
    versions: dict[str, str] = catalog.python_packages().numpy.by_python
    return versions
