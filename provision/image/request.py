"""From what the user asked for to targets: hosts are surveyed and planned as for an installation, a system and a CUDA are planned alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from provision import catalog
from provision.base import engine_source
from provision.base.engine_source import EngineSource
from provision.base.errors import ProvisionError, UsageError
from provision.base.problems import Problem
from provision.commands import planning
from provision.image import bases, targets
from provision.image.targets import Target
from provision.inventory import Inventory
from provision.plan.options import Options, requirements_of
from provision.remote.progress import Progress
from provision.remote.session import Session
from provision.survey import collect


@dataclass(frozen=True)
class Subject:
    """What an image is to be of: hosts (by inventory or a file of their facts), or a system with or without a CUDA."""

    inventory: Inventory | None = None
    facts_file: Path | None = None
    limit: str | None = None
    system: str | None = None
    cuda: str | None = None
    cpu: bool | None = None
    base: str | None = None

    @property
    def named(self) -> bool:
        """Whether anything was named at all."""
        return bool(self.inventory or self.facts_file or self.system or self.cuda or self.cpu or self.base)


@dataclass(frozen=True)
class Asked:
    """A target, the engine's sources for it, and where there is a lock the wheels that it must take, as `render.context` takes them."""

    target: Target
    engine: EngineSource
    locked: Mapping[str, list[dict[str, Any]]] = field(default_factory=dict)


def targets_of(subject: Subject, options: Options, progress: Progress, passwords: Mapping[str, str]) -> tuple[list[Asked], list[Problem]]:
    """The images that were asked for, and what is odd about the hosts that they are for.

    Raises:
        UsageError: there is no such image, or nothing was named.
        ProvisionError: no plan fits, or hosts cannot be looked at.
    """
    _refuse_horovod_names(options)
    if subject.inventory is not None or subject.facts_file is not None:
        return _of_hosts(subject, options, progress, passwords)
    if not subject.named:
        raise UsageError("nothing to make an image of", hint="name HOSTS, or --os ubuntu22.04 --cuda 12.4, or --cpu")
    cuda = bases.asked(subject.cuda) if subject.cuda else None
    if subject.system:
        system = bases.system_of(subject.system)
    else:
        system = bases.newest_system(cuda) if cuda else catalog.images().distributions.default
    engine = engine_source.pack()
    return [Asked(targets.of_system(system, cuda, requirements_of(options, engine), given=subject.base), engine)], []


def everything(options: Options) -> list[Asked]:
    """Every image that can be made."""
    _refuse_horovod_names(options)
    engine = engine_source.pack()
    requirements = requirements_of(options, engine)
    return [Asked(targets.of_system(system, cuda, requirements), engine) for system, cuda in targets.matrix()]


def _refuse_horovod_names(options: Options) -> None:
    if options.horovod_names:
        raise UsageError("images are made without Horovod's names for the engine", hint="leave --horovod-names out")


def _of_hosts(subject: Subject, options: Options, progress: Progress, passwords: Mapping[str, str]) -> tuple[list[Asked], list[Problem]]:
    inventory, options = subject.inventory, replace(options, cpu=subject.cpu)
    if subject.facts_file is not None:
        inventory, known, problems = collect.read_file(subject.facts_file, inventory, subject.limit)
    else:
        assert inventory is not None  # noqa: S101 - one of both was given
        session = Session(inventory, progress, passwords)
        try:
            survey = collect.survey_hosts(session)
        finally:
            session.close()
        known, problems = survey.hosts, survey.problems
    absent = [host.name for host in inventory.hosts if host.name not in known]
    if absent:
        said = "; ".join(str(problem) for problem in problems if problem.host in absent)
        raise ProvisionError(f"nothing is known of {', '.join(absent)}: {said}", hint="fix that, or leave them out: --limit")
    plan, sources = planning.make_plan(inventory, known, options, planning.lock_to_keep(inventory, options))
    planning.refuse_conflicts(plan)
    made = targets.of_hosts(plan, known, given=subject.base)
    return [Asked(each, sources.engine, _locked(sources.locked.get(each.hosts[0], {}))) for each in made], problems


def _locked(environments: Mapping[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """On hosts what builds is in the environment of what runs; in images it has one of its own."""
    return {**environments, "build": environments.get("venv", [])}
