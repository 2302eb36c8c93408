"""Comparison of hosts with the plan and the lock, by their surveys alone: where nothing differs, no step has to run. Pure.

A host's manifest says what the last complete run installed; the survey's `drift` lists what was changed since.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from provision.base.problems import Problem
from provision.install.rollout import Rollout
from provision.plan.lock import Files, Lock, LockedComponent, environments
from provision.plan.manifest import Manifest
from provision.plan.model import HostPlan
from provision.plan.summary import TITLES
from provision.survey import Facts
from provision.survey.model import Drift


def reasons_to_run(rollout: Rollout) -> dict[str, Problem]:
    """Host → why the installation has to run there; complete hosts are left out."""
    found = {}
    for name, wanted in rollout.manifests.items():
        bad = rollout.plan.hosts[name].hwloc
        if bad and bad.source == "remove":
            found[name] = _reason("to-be-removed", f"{bad.package} must be removed")
        elif (reason := reason_to_run(wanted, rollout.facts[name])) is not None:
            found[name] = reason
    return found


def reason_to_run(wanted: Manifest, facts: Facts) -> Problem | None:
    """Why the installation must run on a host; None where it is complete.

    Args:
        wanted: the manifest that a run would write.
        facts: the host's.
    """
    installed = facts.installed
    if installed.manifest is None:
        error = installed.manifest_error
        return _reason(error.kind, str(error)) if error else _reason("not-installed", "nothing is installed yet")
    if facts.drift is None or "drift" in facts.errors:
        return _reason("drift-unknown", "the survey could not find out what has changed there")
    if facts.dpkg_interrupted or facts.broken_packages:
        return _reason("packages-interrupted", "a package installation was interrupted")
    if difference := _difference(_essence(wanted.as_dict()), _essence(installed.manifest.as_dict())):
        return _reason("plan-differs", f"the plan differs from what was installed: {difference}")
    if without_key := _without_key(wanted):
        return _reason("key-unknown", f"the key of {', '.join(without_key)} is not known")
    if facts.drift:
        return _reason("drift", "; ".join(map(str, facts.drift[:3])))
    return None


def _reason(id: str, what: str) -> Problem:
    return Problem("note", what, id=id)


def from_lock(lock: Lock, host: HostPlan, files: Files) -> Iterator[Drift]:
    """How an installed host differs from what the lock says of it.

    Args:
        host: the plan in its manifest.
        files: folder in the prefix → package → the file that it was installed from.
    """
    locked = {name: entry for name, entries in lock.components.items() for entry in entries if host.name in entry.hosts}
    if not locked:
        yield Drift(kind="host-not-in-lock", subject=host.name, lock=lock.title)
        return
    for name in lock.components:
        component = getattr(host, name)
        held, wanted = LockedComponent.of(component) if component else None, locked.get(name)
        if (held and held.identity) == (wanted and wanted.identity):
            continue
        title = TITLES.get(name, name)
        if held and wanted and str(held) == str(wanted):
            fields = [field for field in type(held).model_fields if getattr(held.identity, field) != getattr(wanted.identity, field)]
            yield Drift(kind="differs-in-fields", subject=title, found=str(held), wanted=", ".join(fields), lock=lock.title)
        else:
            said, needed = str(held or "not installed"), str(wanted or "nothing")
            yield Drift(kind="differs-from-lock", subject=title, found=said, wanted=needed, lock=lock.title)
    for folder, key in environments(host).items():
        wanted_versions: dict[str, list[str]] = {}
        for entry in lock.environments.get(key, ()):
            wanted_versions.setdefault(entry.name, []).append(entry.version)
        for package, versions in wanted_versions.items():
            version = files.get(folder, {}).get(package, {}).get("version")
            if version not in versions:
                subject, said = f"{package} in {host.prefix}/{folder}", version or "not installed"
                yield Drift(kind="differs-from-lock", subject=subject, found=said, wanted=" or ".join(versions), lock=lock.title)


def is_rewritten(wanted: Manifest, facts: Facts) -> bool:
    """Whether a run will change a host's manifest."""
    manifest = facts.installed.manifest
    return manifest is None or _essence(wanted.as_dict()) != _essence(manifest.as_dict()) or bool(_without_key(wanted))


def _without_key(wanted: Manifest) -> list[str]:
    """The members whose public key is not known yet."""
    return [name for name, member in wanted.members.items() if member["key"] is None] if len(wanted.members) > 1 else []


def _essence(value: Any) -> Any:
    """Plain data without reasons and repositories: neither changes what is installed on a host."""
    if isinstance(value, Mapping):
        return {key: _essence(entry) for key, entry in value.items() if key not in ("why", "rejected", "repository")}
    if isinstance(value, (list, tuple)):
        return [_essence(entry) for entry in value]
    return json.loads(json.dumps(value))


def _difference(wanted: Any, found: Any, at: str = "") -> str | None:
    """The first place where two documents differ, in words."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        for key in dict.fromkeys([*wanted, *found]):
            if difference := _difference(wanted.get(key), found.get(key), f"{at}.{key}" if at else str(key)):
                return difference
        return None
    return None if wanted == found else f"{at.removeprefix('host.')} is {_short(found)}, not {_short(wanted)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
