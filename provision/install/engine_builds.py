"""The engine for hosts: a wheel that `make dist` has made, else a build, made once per distribution and architecture by one of them."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from provision.base import downloads
from provision.base.engine_source import EngineSource
from provision.base.errors import ProvisionError
from provision.catalog import Catalog
from provision.install import builds
from provision.plan.model import HostPlan, Plan
from provision.resolve.engine import fitting_wheel
from provision.survey import Facts


def key_of(host: HostPlan, catalog: Catalog) -> str:
    """Names the wheel, or the build, that a host gets. It loads Python, PyTorch and MPI at run time, so they are no part of the name.

    What a user without root has built is not installed by root on other hosts.
    """
    if host.engine.file:
        return host.engine.file.removesuffix(builds.ENGINE.ending)
    return _key(host.engine.version, str(host.engine.sha256), host.system, host.arch, host.root, catalog)


def adopt_wheels(plan: Plan, engine: EngineSource, bundled: Path | None = None) -> None:
    """Keep the wheels that the plan takes as builds. Those in the supplies of a bundle (``bundled``) stay there.

    Raises ProvisionError for a damaged wheel.
    """
    taken = {host.engine.file for host in plan.hosts.values()}
    for wheel in reversed([each for each in engine.wheels if each.name in taken and bundled not in each.parents]):  # the first one stays
        try:
            with zipfile.ZipFile(wheel) as made:
                damaged = made.testzip()
        except (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, RuntimeError) as error:
            damaged = str(error)
        if damaged:
            raise ProvisionError(f"invalid wheel: {damaged}", where=str(wheel), hint="copy it again, or build it: make dist")
        if builds.cached(builds.ENGINE, wheel.stem) != downloads.digest(wheel):
            builds.keep(builds.ENGINE, wheel.stem, wheel.read_bytes())


def with_bundled(engine: EngineSource, supplies: Path) -> EngineSource:
    """The engine with its wheels in the supplies of a bundle, as far as they have their checksums there, after those that it has."""
    found = replace(engine, wheels=()).with_wheels(supplies / builds.ENGINE.name).wheels
    return replace(engine, wheels=(*engine.wheels, *(each for each in found if builds.cached(builds.ENGINE, each.stem, supplies))))


def known_for(engine: EngineSource, catalog: Catalog, bundled: Path | None = None) -> Callable[[Facts], bool]:
    """Whether a host has this engine, or gets it without a compiler: one of its wheels fits, or its build is kept here or in the supplies
    of a bundle."""

    def is_known(facts: Facts) -> bool:
        arch = str(facts.arch)
        if facts.installed.plan and facts.installed.plan.engine.sha256 == engine.sha256:
            return True
        if fitting_wheel([wheel.name for wheel in engine.wheels], arch, facts.os.libc)[0]:
            return True
        name = _key(engine.version, engine.sha256, f"{facts.os.id} {facts.os.version}", arch, facts.user.can_become, catalog)
        return builds.cached(builds.ENGINE, name, bundled) is not None

    return is_known


def _key(version: str, sha256: str, system: str, arch: str, root: bool, catalog: Catalog) -> str:
    return builds.key_of(f"collective_core-{version}", system, arch, [sha256, root, catalog.python_packages().build])
