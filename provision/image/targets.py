"""Images to make: a base and a plan for each. For a system and a CUDA one host that fits is invented."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from provision.base.engine_source import EngineSource
from provision.base.errors import ProvisionError
from provision.base.versions import key, minor
from provision.catalog import Catalog
from provision.image import bases
from provision.image.bases import Base
from provision.install import wheels
from provision.plan.manifest import Manifest
from provision.plan.model import CPU_ONLY, HostPlan, Plan
from provision.plan.requirements import DEFAULT_PREFIX, Requirements
from provision.resolve import resolve
from provision.resolve.host_classes import host_class_of, without_gpus
from provision.survey import Facts

_INVENTED = "image"

#: Python environment of an image (``build``, ``venv``, ``nccl``) → the wheels that it must take.
Locked = Mapping[str, Sequence[wheels.Locked]]


@dataclass(frozen=True)
class Target:
    """One image: its base, the plan of what it holds, and the engine's sources.

    Attributes:
        hosts: those that it is for; empty where none were named.
        gpus: the compute capabilities of their GPUs, which it must have code for.
        locked: the wheels of the lock, where there is one.
    """

    base: Base
    host: HostPlan
    engine: EngineSource
    catalog: Catalog
    hosts: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    locked: Locked = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Such as ``ubuntu22.04-cuda12.4`` or ``debian12``."""
        return self.base.name


def of_system(system: str, cuda: str | None, requirements: Requirements, engine: EngineSource, *, base: str | None = None) -> Target:
    """An image of ``ubuntu 22.04``, for the CUDA ``12.4`` or None.

    Raises:
        UsageError: there is no such base image.
        ProvisionError: no plan fits.
    """
    if cuda is not None and base is None:
        bases.release_of(system, cuda, requirements.catalog)  # what does not exist is refused before anything is planned for it
    catalog, known = requirements.catalog, _invented(system, cuda, requirements.catalog)
    plan = resolve({_INVENTED: known}, replace(requirements, packaged_pythons=True), {})
    if plan.conflicts:
        first = plan.conflicts[0]
        options = [remedy.text for remedy in first.remedies if remedy.about == "options"]
        where = bases.short(system) + (f" with CUDA {cuda}" if cuda else "")
        raise ProvisionError(f"no plan fits: {first.what}", where=where, hint="  or  ".join(options) or None)
    found = bases.base(host_class_of(known, catalog), cuda=cuda, own=base)
    return Target(found, _as_image(plan.hosts[_INVENTED], catalog), engine, catalog)


def of_hosts(plan: Plan, known: Mapping[str, Facts], engine: EngineSource, catalog: Catalog, *, base: str | None = None) -> list[Target]:
    """An image for each kind of host of a plan without conflicts.

    Args:
        known: the facts that it was made from.
        base: the user's own image to begin with.
    """
    kinds: dict[tuple[Base, HostPlan], tuple[HostPlan, list[str]]] = {}  # without reasons, in which hosts differ that get the same
    for name, host in plan.hosts.items():
        host_class = host_class_of(known[name], catalog)
        host_class = without_gpus(host_class) if CPU_ONLY in host.engine.options else host_class
        image = _as_image(host, catalog)
        key_ = bases.base(host_class, own=base), Manifest.of(image, "", {}, []).host
        kinds.setdefault(key_, (image, []))[1].append(name)
    targets = [Target(base_, host, engine, catalog, tuple(names), _gpus(names, known)) for (base_, _), (host, names) in kinds.items()]
    if len({target.name for target in targets}) < len(targets):  # same system and CUDA, but something else differs
        targets = [replace(each, base=replace(each.base, name=f"{each.name}-{each.hosts[0]}")) for each in targets]
    return targets


def _gpus(names: Sequence[str], known: Mapping[str, Facts]) -> tuple[str, ...]:
    found = {gpu.compute_capability for name in names for gpu in known[name].gpus if gpu.compute_capability}
    return tuple(sorted(found, key=key))


def _invented(system: str, cuda: str | None, catalog: Catalog) -> Facts:
    os_id, version = system.split()
    described: dict[str, Any] = {"os": {"id": os_id, "version": version}, "arch": "x86_64", "user": {"name": "root", "can_become": True}}
    if cuda is not None:
        described |= {"driver": {"cuda": minor(cuda)}, "gpus": [{}]}
    return Facts.model_validate(described, context=catalog)


def _as_image(host: HostPlan, catalog: Catalog) -> HostPlan:
    """The host's plan without what is its own: name, network, keys, login, and its ways to do without root."""
    known = catalog.images()
    network = replace(host.network, interface="", address="", cidr="", why="a container's own")
    hwloc = host.hwloc
    if hwloc is not None and hwloc.source in ("remove", "leave"):  # the base image has none that is in the way
        hwloc = replace(hwloc, version="", package=host.openmpi.package, source="bundled", rejected=())
    return replace(
        host,
        name=_INVENTED,
        hostname=_INVENTED,
        prefix=DEFAULT_PREFIX,
        slots=1,
        login=known.user.name,
        ssh_port=known.ssh_port,
        ssh_host_keys=(),
        network=network,
        packages=(),
        engine=replace(host.engine, file=None),  # it is compiled in a stage of the image's own
        hwloc=hwloc,
        interpreter=host.python.package,
        root=True,
    )
