"""Builds of the engine for hosts: made once per distribution and architecture by one of them, or a release's wheel.

A wheel that `cibuildwheel` has made fits every Linux with its glibc or a newer one. It is kept as the build of the hosts that it fits, so
that none of them needs a compiler, also in later runs.
"""

from __future__ import annotations

import io
import lzma
import re
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from provision.base.engine_source import EngineSource
from provision.base.errors import ProvisionError
from provision.base.versions import key as version_key
from provision.catalog import Catalog
from provision.install import builds
from provision.plan.model import HostPlan, Plan
from provision.survey import Facts

#: What zipfile raises for a file that is damaged somewhere, encrypted, or of another kind.
_DAMAGED = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, RuntimeError, ValueError)
_PLATFORM = re.compile(r"manylinux_(?P<glibc>\d+_\d+)_(?P<arch>.+)")


def key_of(host: HostPlan, catalog: Catalog) -> str:
    """Names the build that a host gets. It loads Python, PyTorch and MPI at run time, so they are no part of the name.

    What a user without root has built is not installed by root on other hosts.
    """
    return _key(host.engine.version, str(host.engine.sha256), host.system, host.arch, host.root, catalog)


def adopt_wheels(plan: Plan, facts: Mapping[str, Facts], engine: EngineSource, folder: Path | None, catalog: Catalog) -> None:
    """Keep the wheels of the engine in ``folder`` as the builds of the plan's hosts, where they fit and no build is kept yet.

    Raises:
        ProvisionError: a wheel is damaged, or was not made from these sources (its Python modules are compared).
    """
    if folder is None:
        return
    for name, host in plan.hosts.items():
        wheel = _fitting(folder, engine, host.arch, facts[name].os.libc)
        if wheel is not None and builds.cached(builds.ENGINE, key_of(host, catalog)) is None:
            _check(wheel, engine)
            builds.keep(builds.ENGINE, key_of(host, catalog), wheel.read_bytes())


def known_for(engine: EngineSource, folder: Path | None, catalog: Catalog, bundled: Path | None = None) -> Callable[[Facts], bool]:
    """Whether a host has this engine, or gets it without a compiler: its build is kept here or in the supplies of a bundle, or a wheel in
    ``folder`` fits."""

    def is_known(facts: Facts) -> bool:
        arch = str(facts.arch)
        if facts.installed.plan and facts.installed.plan.engine.sha256 == engine.sha256:
            return True
        if folder is not None and _fitting(folder, engine, arch, facts.os.libc):
            return True
        name = _key(engine.version, engine.sha256, f"{facts.os.id} {facts.os.version}", arch, facts.user.can_become, catalog)
        return builds.cached(builds.ENGINE, name, bundled) is not None

    return is_known


def _key(version: str, sha256: str, system: str, arch: str, root: bool, catalog: Catalog) -> str:
    return builds.key_of(f"collective_core-{version}", system, arch, [sha256, root, catalog.python_packages().build])


def _fitting(folder: Path, engine: EngineSource, arch: str, glibc: str | None) -> Path | None:
    """The wheel in ``folder`` of the engine's version that runs with this architecture and glibc."""
    for path in sorted(folder.glob(f"{engine.package}-*.whl")):
        try:
            _name, version, _build, tags = parse_wheel_filename(path.name)
        except InvalidWheelFilename:
            continue
        platforms = [found for tag in tags if (found := _PLATFORM.fullmatch(tag.platform))]
        oldest = [found["glibc"].replace("_", ".") for found in platforms if found["arch"] == arch]
        if str(version) == engine.version and glibc and any(version_key(each) <= version_key(glibc) for each in oldest):
            return path
    return None


def _check(wheel: Path, engine: EngineSource) -> None:
    """Raise ProvisionError unless the Python modules in the wheel are those of the sources; the library is compared when it is loaded."""
    hint = "take the wheel of the same release as provision, or leave it out: hosts with a compiler build the engine"
    try:
        with zipfile.ZipFile(wheel) as made, tarfile.open(fileobj=io.BytesIO(engine.content)) as sources:
            theirs = {name: made.read(name) for name in made.namelist() if name.endswith(".py")}
            inside = f"{engine.package}-{engine.version}/src/"
            ours = {
                member.name.removeprefix(inside): file.read()
                for member in sources
                if member.name.startswith(inside) and member.name.endswith(".py") and (file := sources.extractfile(member))
            }
    except _DAMAGED as error:
        raise ProvisionError(f"it cannot be read: {error}", where=str(wheel), hint=hint) from error
    if theirs != ours:
        raise ProvisionError("it was not built from the engine of this toolkit, or was changed", where=str(wheel), hint=hint)
