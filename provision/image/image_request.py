"""Requests for images, planned: for hosts as an installation is, so that a host and an image of one plan hold the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from provision.base import engine_source
from provision.base.errors import ProvisionError, UsageError
from provision.base.problems import Problem
from provision.base.versions import minor
from provision.catalog import Catalog
from provision.commands import planning
from provision.image import bases
from provision.image.targets import Target, of_hosts, of_system
from provision.inventory import Inventory
from provision.plan.options import Options, requirements_of
from provision.plan.request import Request
from provision.remote.progress import Progress
from provision.remote.session import Session
from provision.survey import Facts, collect


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


def plan_targets(
    request: ImageRequest, options: Options, progress: Progress, passwords: Mapping[str, str]
) -> tuple[list[Target], list[Problem]]:
    """The requested images, and the problems of the hosts that they are for.

    Raises:
        UsageError: unknown image, or none named.
        ProvisionError: no plan fits, or hosts do not answer.
    """
    options = _for_images(options)
    if request.inventory is not None or request.facts_file is not None:
        return _for_request(request, replace(options, cpu=request.cpu), progress, passwords)
    if request.is_empty:
        raise UsageError("nothing to make an image of", hint="name HOSTS, or --os ubuntu22.04 --cuda 12.4, or --cpu")
    cuda = bases.checked_cuda(request.cuda, options.catalog) if request.cuda else None
    if cuda and request.base and not request.system:
        raise UsageError("missing --os: expected the system of --base", hint="name it like --os ubuntu22.04")
    if request.system:
        system = bases.checked_system(request.system, options.catalog)
    else:
        system = bases.newest_system(cuda, options.catalog) if cuda else options.catalog.images().distributions.default
    engine = engine_source.pack()
    return [of_system(system, cuda, requirements_of(options, engine), engine, base=request.base)], []


def plan_all(options: Options) -> list[Target]:
    """Every image that can be made."""
    engine = engine_source.pack()
    requirements = requirements_of(_for_images(options), engine)
    return [of_system(system, cuda, requirements, engine) for system, cuda in matrix(options.catalog)]


def matrix(catalog: Catalog) -> Iterator[tuple[str, str | None]]:
    """Every (system, CUDA or None) that an image can be made of, as the catalogue knows it."""
    for system in bases.systems(catalog):
        yield system, None
        for cuda in dict.fromkeys(map(minor, bases.cudas(system, catalog))):
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
        inventory, known, problems = collect.read_file(request.facts_file, request.inventory, request.limit, options.catalog)
        return _of_facts(request, options, inventory, known, problems), problems
    assert request.inventory is not None  # noqa: S101 - one of both was given
    with Session(request.inventory, progress, passwords, command="provision image", catalog=options.catalog) as session:
        survey = collect.survey_hosts(session)
        return _of_facts(request, options, request.inventory, survey.hosts, survey.problems), survey.problems


def _of_facts(
    request: ImageRequest, options: Options, inventory: Inventory, known: Mapping[str, Facts], problems: Sequence[Problem]
) -> list[Target]:
    absent = [host.name for host in inventory.hosts if host.name not in known]
    if absent:
        reasons = "; ".join(str(problem) for problem in problems if problem.host in absent)
        raise ProvisionError(f"missing facts of {', '.join(absent)}: {reasons}", hint="fix that, or leave them out: --limit")
    rollout = planning.make_plan(Request.of(inventory, options), known)
    plan, sources = rollout.plan, rollout.sources
    plan.refuse_conflicts()
    targets = []
    for target in of_hosts(plan, known, sources.engine, options.catalog, base=request.base):
        environments = sources.locked.get(target.hosts[0], {})
        # On hosts what builds and PyTorch are in the environment of what runs; in images they have folders of their own.
        targets.append(replace(target, locked={**environments, **dict.fromkeys(("build", "torch"), environments.get("venv", []))}))
    return targets
