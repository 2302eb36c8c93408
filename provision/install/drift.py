"""Comparison of hosts with the plan and the lock, by their surveys alone: where nothing differs, no step has to run. Pure.

A host's manifest says what the last complete run installed; the survey's `drift` lists what was changed since.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from provision.base.problems import Problem
from provision.base.text import grouped
from provision.install.rollout import Rollout
from provision.plan.lock import Files, Lock, LockedComponent, environments
from provision.plan.manifest import Manifest, digest_of
from provision.plan.model import COMPONENTS, HostPlan
from provision.plan.summary import TITLES
from provision.survey import Facts
from provision.survey.model import Drift

_MAX_CHANGES = 3  # that are named


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
    if changes := list(islice(_changes(_essence(wanted), _essence(installed.manifest)), _MAX_CHANGES)):
        return _reason("plan-differs", f"changed since the last installation: {'; '.join(changes)}")
    if without_key := _without_key(wanted):
        return _reason("key-unknown", f"the key of {', '.join(without_key)} is not known")
    if facts.drift:
        return _reason("drift", "; ".join(map(str, facts.drift[:_MAX_CHANGES])))
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
        for package, versions in grouped((entry.name, entry.version) for entry in lock.environments.get(key, ())).items():
            version = files.get(folder, {}).get(package, {}).get("version")
            if version not in versions:
                subject, said = f"{package} in {host.prefix}/{folder}", version or "not installed"
                yield Drift(kind="differs-from-lock", subject=subject, found=said, wanted=" or ".join(versions), lock=lock.title)


def is_rewritten(wanted: Manifest, facts: Facts) -> bool:
    """Whether a run will change a host's manifest."""
    manifest = facts.installed.manifest
    return manifest is None or _essence(wanted) != _essence(manifest) or bool(_without_key(wanted))


def _without_key(wanted: Manifest) -> list[str]:
    """The members whose public key is not known yet."""
    members = {} if isinstance(wanted.members, str) else wanted.members
    return [name for name, member in members.items() if member["key"] is None] if len(members) > 1 else []


def _essence(manifest: Manifest) -> Any:
    return _plain({**manifest.as_dict(), "members": digest_of(manifest.members)})


def _plain(value: Any) -> Any:
    """Plain data without reasons and repositories: neither changes what is installed on a host."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items() if key not in ("why", "rejected", "repository")}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return json.loads(json.dumps(value))


def _changes(new: Mapping[str, Any], old: Mapping[str, Any]) -> Iterator[str]:
    """What differs between two manifests, in words of hosts and options."""
    for name in COMPONENTS:
        if (now := new["host"].get(name)) != (before := old["host"].get(name)):
            yield f"{TITLES.get(name, name)} {_change(now or {}, before or {})}"
    for field in sorted(new["host"].keys() - {*COMPONENTS}):
        if (now := new["host"][field]) != (before := old["host"].get(field)):
            plain = {type(now), type(before)} <= {str, int}
            yield f"{field.replace('_', ' ')} {f'{_short(before)} → {_short(now)}' if plain else 'changed'}"
    if new["cluster"] != old["cluster"]:
        yield "the inventory has other hosts or addresses"
    elif new["members"] != old["members"]:
        yield "another host has other keys, ports, logins or slots"
    if new["build"] != old["build"]:
        yield "the tools that build the engine have other versions"


def _change(new: Mapping[str, Any], old: Mapping[str, Any]) -> str:
    """What differs between two variants of a component, whose name precedes it."""
    version, before = new.get("version") or "none", old.get("version") or "none"
    if version != before or not new or not old:
        return f"{_short(before)} → {_short(version)}"
    if new["source"] != old["source"]:
        return f"{version} comes from another place ({_short(old['source'])} → {new['source']})"
    now, then = set(new["options"]), set(map(str, old["options"]))
    if now != then:
        parts = [(word, ", ".join(sorted(each))) for word, each in (("with", now - then), ("without", then - now)) if each]
        return f"{version} {' and '.join(f'{word} {_short(names)}' for word, names in parts)}"
    has_others = new["source"] in ("bundled", "source") and new["sha256"] != old.get("sha256")
    return f"{version} has other sources" if has_others else f"{version} comes from another file, index or path"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
