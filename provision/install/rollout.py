"""Rollout: what is installed on which hosts, and from where; and what follows from that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from provision.base.engine_source import EngineSource
from provision.catalog import Catalog
from provision.install import artifacts, ssh_mesh
from provision.install.bundle.archive import Bundle
from provision.install.roles import ROLES, Role, steps
from provision.install.ssh_mesh import Member
from provision.inventory import Inventory
from provision.plan.lock import LockedFiles
from provision.plan.manifest import Manifest
from provision.plan.model import Plan
from provision.plan.request import Request
from provision.survey import Facts


@dataclass(frozen=True)
class PackageSources:
    """Where everything that is installed comes from, besides the hosts' own package indexes.

    Attributes:
        wheels: a folder with the user's wheels: of PyTorch, and of the engine.
        locked: host → environment in the prefix → the files that uv must install there, by provision.lock.
        bundle: with it nothing is downloaded.
    """

    engine: EngineSource
    wheels: Path | None = None
    index_url: str | None = None
    apt_mirror: str | None = None
    user_files: artifacts.UserFiles = field(default_factory=artifacts.UserFiles)
    locked: LockedFiles = field(default_factory=dict)
    bundle: Bundle | None = None


@dataclass(frozen=True)
class Rollout:
    """What is installed on which hosts, and from where. What follows from that is computed once.

    Attributes:
        facts: of the hosts, as the survey before has found them.
    """

    request: Request
    plan: Plan
    facts: Mapping[str, Facts]
    sources: PackageSources

    @property
    def inventory(self) -> Inventory:
        """The hosts of the run, of which some may have no plan."""
        return self.request.inventory

    @property
    def complete(self) -> bool:
        """Whether the plan has every host of the run; otherwise the cluster's configuration stays as it is, instead of shrinking."""
        return {host.name for host in self.inventory.hosts} == set(self.plan.hosts)

    @cached_property
    def members(self) -> dict[str, Member]:
        """The members of the cluster."""
        return ssh_mesh.members(self.plan, self.inventory, self.facts)

    @cached_property
    def manifests(self) -> dict[str, Manifest]:
        """Each host's manifest, as it will be once the plan is installed."""
        cluster, build = ssh_mesh.cluster_id(self.inventory), build_packages(self.request.options.catalog)
        return {
            name: Manifest.of(host, cluster, self.members if self.complete else self._known(self.facts.get(name)), build)
            for name, host in self.plan.hosts.items()
        }

    def _known(self, facts: Facts | None) -> Mapping[str, Member] | str:
        """The members that a host knows already, or a digest of them."""
        manifest = facts.installed.manifest if facts else None
        return manifest.members if manifest and isinstance(manifest.members, str) else ssh_mesh.remembered(facts)

    @cached_property
    def roles(self) -> list[Role]:
        """The roles of the playbook, in their order."""
        wanted, hosts = steps(self.request.options.first_step), self.plan.hosts.values()
        left_out = set() if self.sources.bundle else {"bundle"}
        if len(self.members) < 2:
            left_out.add("ssh_mesh")
        return [
            role
            for role in ROLES
            if (role.always or role.name in wanted)
            and role.name not in left_out
            and (self.complete or not role.whole_cluster)
            and any(map(role.used, hosts))
        ]

    @property
    def drivers(self) -> list[str]:
        """The hosts on which the plan installs a driver."""
        return [name for name, host in self.plan.hosts.items() if host.driver is not None and host.driver.is_new]


def build_packages(catalog: Catalog) -> list[str]:
    """Exact pins of what builds the engine, and of pip for packages that users add."""
    return [f"{name}=={version}" for name, version in catalog.python_packages().build.items()]
