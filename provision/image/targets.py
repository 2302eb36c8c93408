"""Images to make: from what the user asks for to a base and a plan for each.

For hosts they are planned as an installation is; for a system and a CUDA one host that fits is invented. So a host and an image of one plan
hold the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from provision import catalog
from provision.base import engine_source
from provision.base.engine_source import EngineSource
from provision.base.errors import ProvisionError, UsageError
from provision.base.problems import Problem
from provision.base.versions import minor
from provision.commands import planning
from provision.image import bases
from provision.image.bases import Base
from provision.install import wheels
from provision.inventory import Inventory
from provision.plan.model import HostPlan, Plan
from provision.plan.options import Options, requirements_of
from provision.plan.request import Request
from provision.plan.requirements import DEFAULT_PREFIX, Requirements
from provision.remote.progress import Progress
from provision.remote.session import Session
from provision.resolve import resolve
from provision.resolve.host_classes import host_class_of
from provision.survey import Facts, collect

_INVENTED = "image"

#: Python environment of an image (``build``, ``venv``, ``nccl``) → the wheels that it must take.
Locked = Mapping[str, Sequence[wheels.Locked]]


@dataclass(frozen=True)
class ImageRequest:
    """What the user wants an image of: hosts (by inventory or facts file), or a system with or without a CUDA; ``base`` is their own."""

    inventory: Inventory | None = None
    facts_file: Path | None = None
    limit: str | None = None
    system: str | None = None
    cuda: str | None = None
    cpu: bool | None = None
    base: str | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing was named."""
        return not (self.inventory or self.facts_file or self.system or self.cuda or self.cpu or self.base)


@dataclass(frozen=True)
class Target:
    """One image: its base, the plan of what it holds, and the engine's sources.

    Attributes:
        hosts: those that it is for; empty where none were named.
        locked: the wheels of the lock, where there is one.
    """

    base: Base
    host: HostPlan
    engine: EngineSource
    hosts: tuple[str, ...] = ()
    locked: Locked = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Such as ``ubuntu22.04-cuda12.4`` or ``debian12``."""
        return self.base.name


def plan_targets(
    request: ImageRequest, options: Options, progress: Progress, passwords: Mapping[str, str]
) -> tuple[list[Target], list[Problem]]:
    """The requested images, and the problems of the hosts that they are for.

    Raises:
        UsageError: there is no such image, or nothing was named.
        ProvisionError: no plan fits, or hosts do not answer.
    """
    options = _for_images(options)
    if request.inventory is not None or request.facts_file is not None:
        return _for_request(request, replace(options, cpu=request.cpu), progress, passwords)
    if request.is_empty:
        raise UsageError("nothing to make an image of", hint="name HOSTS, or --os ubuntu22.04 --cuda 12.4, or --cpu")
    cuda = bases.checked_cuda(request.cuda) if request.cuda else None
    if request.system:
        system = bases.checked_system(request.system)
    else:
        system = bases.newest_system(cuda) if cuda else catalog.images().distributions.default
    engine = engine_source.pack()
    return [of_system(system, cuda, requirements_of(options, engine), engine, base=request.base)], []


def plan_all(options: Options) -> list[Target]:
    """Every image that can be made."""
    engine = engine_source.pack()
    requirements = requirements_of(_for_images(options), engine)
    return [of_system(system, cuda, requirements, engine) for system, cuda in matrix()]


def matrix() -> Iterator[tuple[str, str | None]]:
    """Every (system, CUDA or None) that an image can be made of, as the catalogue knows it."""
    for system in bases.systems():
        yield system, None
        for cuda in dict.fromkeys(map(minor, bases.cudas(system))):
            yield system, cuda


def _for_images(options: Options) -> Options:
    """The options without what images lack: a Python that no package of the distribution has."""
    if options.horovod_names:
        raise UsageError("images are made without Horovod's names for the engine", hint="leave --horovod-names out")
    return replace(options, packaged_pythons=True)


def _for_request(
    request: ImageRequest, options: Options, progress: Progress, passwords: Mapping[str, str]
) -> tuple[list[Target], list[Problem]]:
    if request.facts_file is not None:
        inventory, known, problems = collect.read_file(request.facts_file, request.inventory, request.limit)
        return _of_facts(request, options, inventory, known, problems), problems
    assert request.inventory is not None  # noqa: S101 - one of both was given
    with Session(request.inventory, progress, passwords, command="provision image") as session:
        survey = collect.survey_hosts(session)
        return _of_facts(request, options, request.inventory, survey.hosts, survey.problems), survey.problems


def _of_facts(
    request: ImageRequest, options: Options, inventory: Inventory, known: Mapping[str, Facts], problems: Sequence[Problem]
) -> list[Target]:
    absent = [host.name for host in inventory.hosts if host.name not in known]
    if absent:
        reasons = "; ".join(str(problem) for problem in problems if problem.host in absent)
        raise ProvisionError(f"nothing is known of {', '.join(absent)}: {reasons}", hint="fix that, or leave them out: --limit")
    rollout = planning.make_plan(Request.of(inventory, options), known)
    plan, sources = rollout.plan, rollout.sources
    plan.refuse_conflicts()
    targets = []
    for target in of_hosts(plan, known, sources.engine, base=request.base):
        environments = sources.locked.get(target.hosts[0], {})
        # On hosts what builds is in the environment of what runs; in images it has one of its own.
        targets.append(replace(target, locked={**environments, "build": environments.get("venv", [])}))
    return targets


def of_system(system: str, cuda: str | None, requirements: Requirements, engine: EngineSource, *, base: str | None = None) -> Target:
    """An image of ``ubuntu 22.04``, for the CUDA ``12.4`` or None.

    Raises:
        UsageError: there is no such base image.
        ProvisionError: no plan fits.
    """
    if cuda is not None and base is None:
        bases.release_of(system, cuda)  # what does not exist is refused before anything is planned for it
    known = _invented(system, cuda)
    plan = resolve({_INVENTED: known}, replace(requirements, packaged_pythons=True), {})
    if plan.conflicts:
        first = plan.conflicts[0]
        options = [remedy.text for remedy in first.remedies if remedy.about == "options"]
        where = bases.short(system) + (f" with CUDA {cuda}" if cuda else "")
        raise ProvisionError(f"no plan fits: {first.what}", where=where, hint="  or  ".join(options) or None)
    return Target(bases.base(host_class_of(known), cuda=cuda, own=base), _as_image(plan.hosts[_INVENTED]), engine)


def of_hosts(plan: Plan, known: Mapping[str, Facts], engine: EngineSource, *, base: str | None = None) -> list[Target]:
    """An image for each kind of host of a plan without conflicts.

    Args:
        known: the facts that it was made from.
        base: the user's own image to begin with.
    """
    kinds: dict[tuple[Base, HostPlan], list[str]] = {}
    for name, host in plan.hosts.items():
        kinds.setdefault((bases.base(host_class_of(known[name]), own=base), _as_image(host)), []).append(name)
    targets = [Target(base_, host, engine, tuple(names)) for (base_, host), names in kinds.items()]
    if len({target.name for target in targets}) < len(targets):  # same system and CUDA, but something else differs
        targets = [replace(each, base=replace(each.base, name=f"{each.name}-{each.hosts[0]}")) for each in targets]
    return targets


def _invented(system: str, cuda: str | None) -> Facts:
    os_id, version = system.split()
    described: dict[str, Any] = {"os": {"id": os_id, "version": version}, "arch": "x86_64", "user": {"name": "root", "can_become": True}}
    if cuda is not None:
        described |= {"driver": {"cuda": minor(cuda)}, "gpus": [{}]}
    return Facts.model_validate(described)


def _as_image(host: HostPlan) -> HostPlan:
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
        hwloc=hwloc,
        interpreter=host.python.package,
        root=True,
    )
