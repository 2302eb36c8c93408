"""What images are asked for: of hosts by their facts, or of a system and a CUDA, for which one host that fits is invented.

The same resolver plans for both, so that a host and an image of one plan hold the same things. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from provision import catalog, facts
from provision.base.errors import ProvisionError
from provision.base.versions import minor
from provision.facts import Facts
from provision.image import bases
from provision.image.bases import Base
from provision.plan.model import HostPlan, Plan
from provision.plan.requirements import DEFAULT_PREFIX, Requirements
from provision.resolve import resolve
from provision.resolve.machine import machine

_INVENTED = "image"


@dataclass(frozen=True)
class Target:
    """One image: what it begins with, and the plan of what it holds. ``hosts``: those it is for; empty where none were named."""

    base: Base
    host: HostPlan
    hosts: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Such as ``ubuntu22.04-cuda12.4`` or ``debian12``."""
        return self.base.name


def of_system(system: str, cuda: str | None, requirements: Requirements, *, given: str | None = None) -> Target:
    """An image of ``ubuntu 22.04``, for the CUDA ``12.4`` or None.

    Raises:
        UsageError: there is no such base image.
        ProvisionError: no plan fits.
    """
    if cuda is not None and given is None:
        bases.for_cuda(system, cuda)  # what does not exist is said before anything is planned for it
    known = _invented(system, cuda)
    plan = resolve({_INVENTED: known}, requirements, {})
    if plan.conflicts:
        first = plan.conflicts[0]
        options = [remedy.text for remedy in first.remedies if remedy.about == "options"]
        where = bases.short(system) + (f" with CUDA {cuda}" if cuda else "")
        raise ProvisionError(f"no plan fits: {first.what}", where=where, hint="  or  ".join(options) or None)
    return Target(bases.base(machine(known), cuda=cuda, given=given), _as_image(plan.hosts[_INVENTED]))


def of_hosts(plan: Plan, known: Mapping[str, Facts], *, given: str | None = None) -> list[Target]:
    """An image for each kind of host of a plan.

    Args:
        plan: without conflicts.
        known: the facts that it was made from.
        given: an image of the user's own to begin with.
    """
    found: dict[tuple[Base, HostPlan], list[str]] = {}
    for name, host in plan.hosts.items():
        base = bases.base(machine(known[name]), given=given)
        found.setdefault((base, _as_image(host)), []).append(name)
    targets = [Target(base, host, tuple(names)) for (base, host), names in found.items()]
    if len({target.name for target in targets}) < len(targets):  # same system and CUDA, but something else differs
        targets = [replace(each, base=replace(each.base, name=f"{each.name}-{each.hosts[0]}")) for each in targets]
    return targets


def matrix() -> Iterator[tuple[str, str | None]]:
    """Every (system, CUDA or None) that an image can be made of, as the catalogue knows it."""
    for system in bases.systems():
        yield system, None
        for cuda in dict.fromkeys(map(minor, bases.cudas(system))):
            yield system, cuda


def _invented(system: str, cuda: str | None) -> Facts:
    os_id, version = system.split()
    described: dict[str, Any] = {"os": {"id": os_id, "version": version}, "arch": "x86_64", "user": {"name": "root", "can_become": True}}
    if cuda is not None:
        described |= {"driver": {"cuda": minor(cuda)}, "gpus": [{}]}
    return facts.Facts.model_validate(described)


def _as_image(host: HostPlan) -> HostPlan:
    """The host's plan without what is its own: name, network, keys, login, and where it had to do without root."""
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
        hwloc=hwloc,
        interpreter=host.python.package,
        root=True,
    )
