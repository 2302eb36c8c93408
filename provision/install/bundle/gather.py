"""Gathering a bundle: the hosts list their packages, then everything that the plan needs is fetched to this machine."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from provision.base import aptsources, paths
from provision.base.downloads import Say
from provision.base.errors import ProvisionError
from provision.base.versions import minor
from provision.install import artifacts, engine_builds, wheels
from provision.install.bundle import debs
from provision.install.bundle.archive import BundledHost, machine_of, pack, package_name, requirements_of
from provision.install.rollout import PackageSources, build_packages
from provision.launch.smoke import mnist
from provision.plan.lock import Files, Lock
from provision.plan.model import HostPlan, Plan
from provision.plan.options import Options
from provision.remote import ssh
from provision.remote.session import Session
from provision.survey import Facts

_APT_FILES_TIMEOUT_S = 600.0  # a host's list of packages has some megabytes


def gather(
    session: Session,
    plan: Plan,
    facts: Mapping[str, Facts],
    options: Options,
    sources: PackageSources,
    target: Path,
    locked: Lock | None,
) -> None:
    """Write into ``target`` all that the plan needs, and with PyTorch the smoke job's data. Changes nothing on the hosts.

    Args:
        locked: the inventory's lock: what it has is taken as it says.
    """
    _check(plan, options.wheels)
    say = session.progress.doing
    with tempfile.TemporaryDirectory(prefix=".provision-bundle-", dir=target.parent) as name:
        folder, work = Path(name) / "content", Path(name) / "work"
        folder.mkdir()
        apt_files = _read_apt_files(session, plan)
        gathered: dict[str, list[wheels.WheelFile]] = {}
        hosts: dict[str, BundledHost] = {}
        files: dict[str, Files] = {}
        for host in plan.hosts.values():
            platform = wheels.Platform(minor(host.python.version), host.arch, facts[host.name].os.libc or "2.17")
            # PyTorch's own index in addition to the other, as on the hosts.
            indexes = wheels.Indexes(options.index_url, host.torch.index if host.torch else None, options.wheels)
            found: dict[str, tuple[str, ...]] = {"venv": (), "nccl": ()}
            taken = {}
            for environment, pins in _pins(host, options).items():
                kind = _kind(host, pins)
                if kind not in gathered:
                    entries = sources.locked.get(host.name, {}).get(environment, [])
                    gathered[kind] = wheels.gather(pins, platform, folder / "wheels" / kind, indexes, entries, say=say)
                found[environment] = tuple(f"{kind}/{wheel.file}" for wheel in gathered[kind])
                # They come from the bundle, so no address is known.
                taken[environment] = {each.name: {"version": each.version, "url": None, "sha256": each.sha256} for each in gathered[kind]}
            files[host.name] = taken
            packages = _gather_debs(host, facts[host.name], apt_files[host.name], work / host.name, folder / "debs", options, say)
            hosts[host.name] = BundledHost(
                machine=machine_of(host),
                requirements=tuple(requirements_of(host)),
                wheels=found["venv"],
                nccl_wheels=found["nccl"],
                **packages,
            )
        engine_builds.adopt_wheels(plan, sources.engine)
        supplies = artifacts.carry(plan, folder / "supplies", sources.user_files, options.catalog, say=say)
        supplies |= artifacts.carry_uv(plan, folder / "supplies", options.index_url, options.catalog, say)
        listing = {
            "hosts": {name: host.model_dump() for name, host in hosts.items()},
            "lock": Lock.from_plan(plan, files, locked, session.inventory).as_dict(),
            "data": gather_data(folder / "cache", options, session.progress.line)
            if any(host.torch for host in plan.hosts.values())
            else None,
            "supplies": supplies,
        }
        pack(folder, listing, target)


def _check(plan: Plan, folder: Path | None) -> None:
    """Raise ProvisionError for what cannot be gathered, before anything is fetched."""
    for name, host in plan.hosts.items():
        if host.family != "debian":
            what = "bundles hold packages of Debian and Ubuntu only"
            raise ProvisionError(what, where=name, hint=f"leave it out: --limit '!{name}'")
        if host.torch and host.torch.packages:
            what = f"bundles hold wheels only, and the ROCm of torch {host.torch.version} has a source distribution (rocm)"
            raise ProvisionError(
                what, where=name, hint=f"--torch VERSION with a build of PyTorch's own, or leave it out: --limit '!{name}'"
            )
        artifacts.torch_wheel(host, folder)  # the user's must be there


def _pins(host: HostPlan, options: Options) -> dict[str, list[str]]:
    """Folder in the prefix → what is installed there from the index. NCCL's wheel is apart: PyTorch pins another version."""
    nccl = [host.nccl.package] if host.nccl is not None and host.nccl.source == "wheel" else []
    wanted = [*requirements_of(host), *build_packages(options.catalog)]
    return {"venv": [pin for pin in wanted if "==" in pin and pin not in nccl], **({"nccl": nccl} if nccl else {})}


def _kind(host: HostPlan, pins: list[str]) -> str:
    """The folder that hosts share which get the same files; two builds of PyTorch must not be in one."""
    digest = hashlib.sha256("\n".join(sorted(pins)).encode()).hexdigest()[:8]
    return f"py{minor(host.python.version)}-{host.arch}-{digest}"


def _gather_debs(
    host: HostPlan, facts: Facts, apt_files: str, work: Path, folder: Path, options: Options, say: Say
) -> dict[str, tuple[str, ...]]:
    """The files of the host's system packages, those of NCCL apart (a step of its own installs and holds them), and what the host has."""
    nccl = host.nccl_packages if host.nccl_packages and host.nccl_packages.source != "local_repository" else None
    say(f"{host.name}: packages: {', '.join([*host.packages, *(nccl.packages if nccl else ())]) or 'none, without root'}")
    if not host.packages and nccl is None:
        return {"debs": (), "nccl_debs": (), "relies_on": ()}
    mirror = aptsources.mirror_at(options.apt_mirror, facts.os.id) if options.apt_mirror else None
    try:
        arch = options.catalog.os().debian_name(host.arch)
        apt = debs.Apt(arch, apt_files, work, debs.Release(facts.os.id, facts.os.codename or "", mirror))
        # What an earlier run installed is removed again by `provision remove`.
        pinned = {package_name(package) for package in nccl.packages} if nccl else set()
        earlier = sorted(set(facts.installed.system_packages.added) - set(host.packages) - pinned)
        files = apt.download([*host.packages, *earlier], folder)
        downloaded = {package_name(file) for file in files}
        relies_on = [name for name in apt.installed_dependencies(host.packages) if name not in downloaded]
        if nccl and nccl.repository:
            apt.add_repository(nccl.repository, artifacts.repository_key(nccl.repository, say))
        nccl_files = apt.download(nccl.packages, folder) if nccl else []
    except ProvisionError as error:
        raise ProvisionError(error.what, where=host.name, hint=error.hint) from error
    return {"debs": tuple(files), "nccl_debs": tuple(nccl_files), "relies_on": tuple(relies_on)}


def _read_apt_files(session: Session, plan: Plan) -> dict[str, str]:
    """Host → what `debs.READ_APT_FILES` prints there."""
    answers = ssh.run(session, dict.fromkeys(plan.hosts, debs.READ_APT_FILES), timeout=_APT_FILES_TIMEOUT_S)
    for name, answer in answers.items():
        if answer.code != 0:
            raise ProvisionError(answer.error, where=name)
    return {name: answer.out for name, answer in answers.items()}


def gather_data(cache: Path, options: Options, say: Say) -> str:
    """Copy the smoke job's data into ``cache``, as `mnist.obtain` keeps it; returns which data set it is."""
    dataset = mnist.obtain(paths.cache(), options.catalog, say=say)
    shutil.copytree(dataset.folder, cache / dataset.key, ignore=shutil.ignore_patterns(".*"))
    return dataset.key
