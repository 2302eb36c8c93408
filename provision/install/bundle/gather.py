"""Gathers a bundle: looks at the hosts once more (which packages they have), then brings everything to this machine."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from provision.base import aptsources, downloads, paths, resources
from provision.base.errors import ProvisionError
from provision.base.versions import minor
from provision.facts import Facts
from provision.install import artifacts, installer
from provision.install.bundle import archive, debs, wheels
from provision.plan.cluster_lock import Lock, of_plan
from provision.plan.model import HostPlan, Plan
from provision.remote.session import Session
from provision.smoke import mnist

Say = Callable[[str], None]


@dataclass(frozen=True)
class Places:
    """Where things are fetched from, other than where pip and the hosts' apt look by themselves."""

    index_url: str | None = None
    wheels: Path | None = None
    apt_mirror: str | None = None


def gather(
    session: Session,
    plan: Plan,
    facts: Mapping[str, Facts],
    places: Places,
    sources: installer.PackageSources,
    target: Path,
    locked: Lock | None,
) -> None:
    """Write into ``target`` all that the plan needs, and with PyTorch the training job's data. Changes nothing on the hosts.

    Args:
        locked: the inventory's lock: what it knows is taken as it says.
    """
    _refuse(plan, places.wheels)
    say = session.progress.line
    with tempfile.TemporaryDirectory(prefix=".provision-bundle-", dir=target.parent) as name:
        folder, work = Path(name) / "content", Path(name) / "work"
        folder.mkdir()
        hosts: dict[str, dict[str, Any]] = {}
        brought: dict[str, list[str]] = {}
        seen = _look(session, plan, work / "seen")
        for host in plan.hosts.values():
            target_machine = wheels.Target(minor(host.python.version), host.arch, facts[host.name].os.libc or "2.17")
            found: dict[str, list[str]] = {"venv": [], "nccl": []}
            for environment, pins in _pins(host).items():
                kind = _kind(host, pins)
                if kind not in brought:
                    held = sources.locked.get(host.name, {}).get(environment, [])
                    place, indexes = folder / "wheels" / kind, _indexes(host, places)
                    brought[kind] = wheels.bring(pins, target_machine, place, held, indexes=indexes, find_links=places.wheels, say=say)
                found[environment] = [f"{kind}/{file}" for file in brought[kind]]
            hosts[host.name] = {
                "machine": archive.machine_of(host),
                "requirements": archive.requirements_of(host),
                "wheels": found["venv"],
                "nccl_wheels": found["nccl"],
                **_packages(host, facts[host.name], seen[host.name], work / host.name, folder / "debs", places, say),
            }
        carried = artifacts.carry(plan, folder / "supplies", sources.user_files, say=say)
        carried |= artifacts.carry_uv(plan, folder / "supplies", places.index_url, say)
        dataset = _data(folder / "cache", say) if any(host.torch for host in plan.hosts.values()) else None
        files = {
            name: {"venv": _files(folder, entry["wheels"]), "nccl": _files(folder, entry["nccl_wheels"])} for name, entry in hosts.items()
        }
        lock = of_plan(plan, files, locked, session.inventory)
        archive.pack(folder, {"hosts": hosts, "lock": lock.as_dict(), "data": dataset, "supplies": carried}, target)


def _pins(host: HostPlan) -> dict[str, list[str]]:
    """Folder in the prefix → what is installed there from the index. NCCL's wheel is apart: PyTorch pins another version."""
    nccl = [host.nccl.package] if host.nccl is not None and host.nccl.source == "wheel" else []
    wanted = [*archive.requirements_of(host), *installer.build_packages()]
    return {"venv": [pin for pin in wanted if "==" in pin and pin not in nccl], **({"nccl": nccl} if nccl else {})}


def _refuse(plan: Plan, folder: Path | None) -> None:
    """What cannot be gathered is said before anything is fetched."""
    for name, host in plan.hosts.items():
        if host.family != "debian":
            raise ProvisionError(
                "packages of this kind of system are not gathered yet", where=name, hint=f"leave it out: --limit '!{name}'"
            )
        artifacts.torch_wheel(host, folder)  # of the user's: it must be at hand


def _packages(host: HostPlan, facts: Facts, seen: str, work: Path, folder: Path, places: Places, say: Say) -> dict[str, list[str]]:
    """The files of the host's system packages, those of NCCL apart: they are installed and held by a step of their own. And what is not
    brought because the host has it.
    """
    nccl = host.nccl_packages if host.nccl_packages and host.nccl_packages.source != "local_repository" else None
    say(f"{host.name}: packages: {', '.join([*host.packages, *(nccl.packages if nccl else ())]) or 'none, without root'}")
    found: dict[str, list[str]] = {"debs": [], "nccl_debs": [], "relies_on": []}
    pinned = {archive.name_of_package(package) for package in nccl.packages} if nccl else set()
    try:
        if host.packages or nccl:
            apt = debs.Apt(host.arch, seen, work, _release(facts, places))
            # What came with an earlier run goes again with `provision remove`.
            earlier = sorted(set(facts.installed.system_packages.added) - set(host.packages) - pinned)
            found["debs"] = apt.bring([*host.packages, *earlier], folder)
            brought = {archive.name_of_package(file) for file in found["debs"]}
            found["relies_on"] = [name for name in apt.rely_on(host.packages) if name not in brought]
            if nccl and nccl.repository:
                apt.know(nccl.repository, artifacts.repository_key(nccl.repository, say))
            if nccl:
                found["nccl_debs"] = apt.bring(nccl.packages, folder)
    except ProvisionError as error:
        raise ProvisionError(error.what, where=host.name, hint=error.hint) from error
    return found


def _release(facts: Facts, places: Places) -> debs.Release:
    distribution, codename = facts.os.id, facts.os.codename or ""
    mirror = aptsources.mirror_at(places.apt_mirror, distribution) if places.apt_mirror else None
    return debs.Release(distribution, codename, mirror)


def _kind(host: HostPlan, pins: list[str]) -> str:
    """Hosts that get the same files share a folder; two builds of PyTorch must not lie side by side."""
    digest = hashlib.sha256("\n".join(sorted(pins)).encode()).hexdigest()[:8]
    return f"py{minor(host.python.version)}-{host.arch}-{digest}"


def _indexes(host: HostPlan, places: Places) -> dict[str, str]:
    """pip's settings. PyTorch's own index stands next to the other, as on the hosts."""
    found = {"PIP_INDEX_URL": places.index_url} if places.index_url else {}
    extra = host.torch.index if host.torch else None
    return {**found, "PIP_EXTRA_INDEX_URL": extra} if extra else found


def _look(session: Session, plan: Plan, folder: Path) -> dict[str, str]:
    folder.mkdir(parents=True)
    outcome = session.play(
        resources.folder("playbooks") / "look.yml",
        "Ask the hosts for their packages",
        hosts=list(plan.hosts),
        extra_vars={"provision_look_command": debs.LOOK, "provision_look_folder": str(folder)},
    )
    for name in outcome.failed:
        failure = outcome.hosts[name].failure
        raise ProvisionError(failure.text if failure else "it did not answer", where=name)
    return {name: (folder / name).read_text(encoding="utf-8") for name in plan.hosts}


def _data(cache: Path, say: Say) -> str:
    """The training job's data, as `mnist.obtain` keeps it."""
    dataset = mnist.obtain(paths.cache(), say=say)
    shutil.copytree(paths.cache() / dataset.key, cache / dataset.key, ignore=shutil.ignore_patterns(".*"))
    return dataset.key


def _files(folder: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """The wheels as the lock lists them; they come from the bundle, so no URL is known."""
    found = {}
    for name in names:
        distribution, version = Path(name).name.split("-")[:2]
        digest = downloads.digest(folder / "wheels" / name)
        found[distribution.lower().replace("_", "-").replace(".", "-")] = {"version": version, "url": None, "sha256": digest}
    return found
