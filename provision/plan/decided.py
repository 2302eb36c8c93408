"""What is decided for all hosts of an inventory, also for those that ``--limit`` leaves out: they must go on fitting together.

That is its lock. A run that did not end well leaves no lock, or that of an earlier one, though some hosts have the new things: each run
notes which hosts have what, and where the lock was not written after it, its note counts.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from packaging.version import Version

from provision.base.errors import UsageError
from provision.base.text import some
from provision.inventory import Inventory, last_run
from provision.plan import cluster_lock, lock_file
from provision.plan.cluster_lock import Lock
from provision.plan.model import Conflict, Plan, Remedy

NOTE = "decided.json"
LAST_RUN = "what the last run installed"
# Of these one release is for all hosts: how it is called, and the option that asks for one.
_SAME_EVERYWHERE = {"openmpi": ("Open MPI", "--openmpi-version"), "nccl": ("NCCL", "--nccl"), "torch": ("PyTorch", "--torch")}


def left_out(inventory: Inventory) -> list[str]:
    """The hosts that ``--limit`` leaves out."""
    chosen = {host.name for host in inventory.hosts}
    return [host.name for host in inventory.everyone if host.name not in chosen]


def note(inventory: Inventory, plan: Plan, failed: Collection[str], folder: Path) -> None:
    """Note in the run's folder what hosts have after its installation.

    Where it has ``failed``, that is what they had; where nothing is known of that, what they were to have.
    """
    locked = _lock(inventory)
    before = _later(inventory, locked)
    had = {host for entries in before.components.values() for entry in entries for host in entry["hosts"]} if before else set()
    have = {name: host for name, host in plan.hosts.items() if name not in failed or name not in had}
    components = cluster_lock.of_plan(Plan(have), {}, before, inventory).components
    data = {"inventory": last_run.identity(inventory), "lock": _digest(locked), "components": components}
    (folder / NOTE).write_text(json.dumps(data) + "\n", encoding="utf-8")


def to_keep(inventory: Inventory) -> Lock | None:
    """What a run keeps to where the user asks for nothing else: the lock; under ``--limit`` what the other hosts have.

    Raises UsageError for a lock that cannot be believed.
    """
    locked = lock_file.read(inventory)
    outside = set(left_out(inventory))
    found = _later(inventory, locked) if outside else locked
    if found is None:
        return None
    components = {**found.components, **{name: _as_outside(found.components.get(name, []), outside) for name in _SAME_EVERYWHERE}}
    return replace(found, components={name: entries for name, entries in components.items() if entries})


def _as_outside(entries: list[dict[str, Any]], outside: set[str]) -> list[dict[str, Any]]:
    """The variants of a component in the releases that hosts outside ``--limit`` have; all of them where these have none."""
    theirs = {cluster_lock.release(entry["version"]) for entry in entries if outside & {*entry["hosts"]}}
    return [entry for entry in entries if not theirs or cluster_lock.release(entry["version"]) in theirs]


def for_all(inventory: Inventory) -> Lock | None:
    """What is decided for all hosts; None where nothing is known."""
    return _later(inventory, _lock(inventory))


def conflicts(plan: Plan, inventory: Inventory, *, upgrade: bool) -> list[Conflict]:
    """Where a plan for some hosts does not fit those that are left out."""
    outside = set(left_out(inventory))
    decided = for_all(inventory) if outside else None
    return list(_conflicts(plan, decided, outside, upgrade)) if decided else []


def mixed(lock: Lock) -> list[str]:
    """What hosts have in several releases, though it must be one: ``NCCL 2.26.2 on a, 2.31.2 on b``."""
    found = {name: _releases(lock, name) for name in _SAME_EVERYWHERE}
    return [
        f"{_SAME_EVERYWHERE[name][0]} {', '.join(f'{release} on {some(hosts)}' for release, hosts in releases.items())}"
        for name, releases in found.items()
        if len(releases) > 1
    ]


def _conflicts(plan: Plan, decided: Lock, outside: set[str], upgrade: bool) -> Iterator[Conflict]:
    for name, (title, option) in _SAME_EVERYWHERE.items():
        planned = {host.name: cluster_lock.release(component.version) for host in plan.hosts.values() if (component := getattr(host, name))}
        theirs = _releases(decided, name, outside)
        differing = [host for host in planned if {planned[host]} != {*theirs}]
        if not theirs or not differing:
            continue
        newest = max(theirs, key=Version)
        keep = f"leave --upgrade out, to keep to {newest}" if upgrade else f"{option} {newest}"
        if len(theirs) > 1:  # whatever these hosts get, it differs from some
            others = [host for release, hosts in theirs.items() if release != newest for host in hosts]
            keep = f"name in --limit, too, the hosts without {newest}: {some(others)}"
        whole = "leave --limit out, so that all hosts get the same (hosts that are gone for good: take them off the inventory)"
        kept = "; ".join(f"{some(hosts)} keep {release}" for release, hosts in theirs.items())
        said = (
            f"{title} must be the same everywhere; outside --limit, {kept} ({decided.kept_to}), "
            f"and {some(differing)} would get {planned[differing[0]]}"
        )
        yield Conflict(differing[0], said, (Remedy(keep, "options"), Remedy(whole, "options")))


def _releases(lock: Lock, name: str, among: Collection[str] | None = None) -> dict[str, list[str]]:
    """Release → the hosts that have it, of all or of ``among``."""
    found: dict[str, list[str]] = {}
    for entry in lock.components.get(name, ()):
        if hosts := [host for host in entry["hosts"] if among is None or host in among]:
            found.setdefault(cluster_lock.release(entry["version"]), []).extend(hosts)
    return {release: sorted(hosts) for release, hosts in found.items()}


def _later(inventory: Inventory, locked: Lock | None) -> Lock | None:
    """The lock, or the last run's note, if the lock is still the one that it began with: then that run has not ended well."""
    last = next((each for each in last_run.written(NOTE) if each.get("inventory") == last_run.identity(inventory)), None)
    if last is None or last["lock"] != _digest(locked) or (locked is not None and locked.components == last["components"]):
        return locked
    return Lock(last["components"], locked.environments if locked else {}, kept_to=LAST_RUN)


def _lock(inventory: Inventory) -> Lock | None:
    try:
        return lock_file.read(inventory)
    except UsageError:
        return None  # only --upgrade gets here, which is the way out of a broken file


def _digest(lock: Lock | None) -> str | None:
    return lock.as_dict()["digest"] if lock is not None else None
