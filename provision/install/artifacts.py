"""Files that the controller copies to the hosts: downloaded and verified before the first host is changed.

A URL that answers 404, or a file with another checksum, ends the run here.
"""

from __future__ import annotations

import functools
import hashlib
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict

from provision.base import downloads, paths
from provision.base.downloads import Say
from provision.base.errors import ProvisionError
from provision.catalog import Catalog
from provision.install import builds, engine_builds, from_source, wheels
from provision.plan.lock import LockedFile
from provision.plan.model import HostPlan, Plan, Repository, Wheel


@dataclass(frozen=True)
class UserFiles:
    """The user's own files. The plan's components name them by ``package``, with their checksum."""

    nccl_local: Path | None = None
    nccl_tarball: Path | None = None
    openmpi_tarball: Path | None = None

    def tarball(self, recipe: from_source.Recipe) -> Path | None:
        """The user's tarball of one component."""
        return {"nccl": self.nccl_tarball, "openmpi": self.openmpi_tarball}[recipe.name]


class Supplies(TypedDict):
    """Ansible's variables about files on the controller; paths and checksums of what there is none of are empty."""

    provision_engine_builds: builds.Shares
    provision_openmpi_homes: dict[str, str]
    provision_from_source: dict[str, from_source.Component]
    provision_repository_keys: dict[str, str]
    provision_nccl_local: str


def gather(
    plan: Plan,
    folder: Path,
    user_files: UserFiles,
    catalog: Catalog,
    *,
    fetch: bool,
    bundled: Path | None = None,
    say: Say = lambda _line: None,
) -> Supplies:
    """Put the files that the hosts need into ``folder``; returns the Ansible variables that name them.

    Args:
        fetch: False for a dry run, which needs the variables alone.
        bundled: a bundle's supplies, with its builds; hosts use no package repositories then.

    Raises:
        ProvisionError: a file is unavailable or is not the planned one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return {
        "provision_engine_builds": _engine(plan, folder / "engine", bundled, fetch, catalog),
        "provision_openmpi_homes": {name: host.openmpi_home for name, host in plan.hosts.items()},
        "provision_from_source": _from_sources(plan, folder, user_files, catalog, bundled, fetch, say),
        "provision_repository_keys": repository_keys(plan, folder, say) if fetch and bundled is None else {},
        "provision_nccl_local": str(_nccl_local(plan, folder, user_files.nccl_local) or "") if fetch else "",
    }


def carry(plan: Plan, folder: Path, user_files: UserFiles, catalog: Catalog, *, say: Say = lambda _line: None) -> dict[str, str]:
    """Put into ``folder`` the files that `gather` needs in a closed network; returns what each is → its path there.

    The user's files have their names in `UserFiles`; ``openmpi_sources`` and ``nccl_sources`` are downloaded tarballs. Cached builds are
    put next to them; with all of one component's no tarball of it is needed.
    """
    carried: dict[str, Path] = {}
    folder.mkdir(parents=True, exist_ok=True)
    local = _nccl_local(plan, folder, user_files.nccl_local)
    if local is not None:
        carried["nccl_local"] = local
    _carry_builds(builds.ENGINE, {engine_builds.key_of(host, catalog) for host in plan.hosts.values()}, folder)
    for recipe in from_source.RECIPES:
        hosts = [host for host in plan.hosts.values() if recipe.of(host)]
        if not hosts:
            continue
        place = folder / recipe.name
        keys = {recipe.key(host, catalog) for host in hosts}
        kept = _carry_builds(recipe.kind, keys, folder)
        own = user_files.tarball(recipe)
        if own or kept != keys:
            carried[f"{recipe.name}_{'tarball' if own else 'sources'}"] = _place(from_source.tarball(recipe, hosts[0], own, say), place)
    return {what: path.relative_to(folder.resolve()).as_posix() for what, path in carried.items()}


def _carry_builds(kind: builds.Kind, keys: set[str], folder: Path) -> set[str]:
    """Put cached builds where `builds.files` finds them; returns their keys."""
    place = folder / kind.name
    place.mkdir(exist_ok=True)
    kept = {key for key in keys if builds.cached(kind, key)}
    for path in (path for key in kept for path in builds.files(kind, key)):
        _place(path, place)
    return kept


def _from_sources(
    plan: Plan, folder: Path, user_files: UserFiles, catalog: Catalog, bundled: Path | None, fetch: bool, say: Say
) -> dict[str, from_source.Component]:
    made = {}
    for recipe in from_source.RECIPES:
        found = from_source.variables(recipe, plan, folder / recipe.name, catalog, bundled)
        if fetch and found["build_of"] and _place_kept(recipe.kind, found, folder / recipe.name, bundled) != set(found["builds"]):
            host = plan.hosts[next(iter(found["build_of"]))]
            found["tarball"] = str(_place(from_source.tarball(recipe, host, user_files.tarball(recipe), say), folder / recipe.name))
        made[recipe.name] = found
    return made


def _engine(plan: Plan, folder: Path, bundled: Path | None, fetch: bool, catalog: Catalog) -> builds.Shares:
    keys = {name: engine_builds.key_of(host, catalog) for name, host in plan.hosts.items()}
    shares = builds.shares(builds.ENGINE, keys, list(keys), folder, bundled)
    if fetch:
        _place_kept(builds.ENGINE, shares, folder, bundled)
    return shares


def uv_wheel(arch: str, index_url: str | None, catalog: Catalog, say: Say, bundled: Path | None = None) -> Path:
    """The wheel of uv for an architecture, checked: a bundle's, or the cache's, into which it is fetched where it is not there yet.

    Raises:
        ProvisionError: it is unavailable, or is not the one that the catalogue names.
    """
    known = catalog.python_packages().uv
    pin = f"uv=={known.version}"
    if arch not in known.sha256:
        raise ProvisionError(f"no {pin} for {arch} is known", hint=f"hosts must be one of {', '.join(known.sha256)}")
    folder, name = paths.cache() / "uv-wheels", f"uv-{known.version}-*_{arch}*.whl"
    for wheel in (bundled / "uv").glob(name) if bundled else ():
        if downloads.digest(wheel) == known.sha256[arch]:
            return wheel
    for kept in folder.glob(name):
        if downloads.digest(kept) == known.sha256[arch]:
            return kept
        kept.unlink()
    locked = [LockedFile(name="uv", version=known.version, url=None, sha256=known.sha256[arch])]
    (found,) = wheels.gather([pin], wheels.Platform("3.12", arch, "2.17"), folder, wheels.Indexes(index_url), locked, say=say)
    return folder / found.file


def carry_uv(plan: Plan, folder: Path, index_url: str | None, catalog: Catalog, say: Say) -> dict[str, str]:
    """Put uv's wheels into ``folder``, like `carry`."""
    (folder / "uv").mkdir(parents=True, exist_ok=True)
    wheels_of = {arch: uv_wheel(arch, index_url, catalog, say) for arch in {host.arch for host in plan.hosts.values()}}
    return {f"uv_{arch}": f"uv/{_place(wheel, folder / 'uv').name}" for arch, wheel in wheels_of.items()}


def uv(plan: Plan, folder: Path, index_url: str | None, catalog: Catalog, bundled: Path | None, say: Say) -> dict[str, str]:
    """Architecture → the program, unpacked into ``folder``: of a bundle's supplies, else of the index, None: this machine's pip's."""
    programs = {}
    for arch in {host.arch for host in plan.hosts.values()}:
        wheel = uv_wheel(arch, index_url, catalog, say, bundled)
        target = folder / arch / "uv"
        target.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(wheel) as archive:
            target.write_bytes(archive.read(f"uv-{wheel.name.split('-')[1]}.data/scripts/uv"))
        programs[arch] = str(target.resolve())
    return programs


def _nccl_local(plan: Plan, folder: Path, given: Path | None) -> Path | None:
    for host in plan.hosts.values():
        if host.nccl is None or host.nccl.source != "local_repository":
            continue
        if given is None:  # the lock has it from an earlier run
            hint = "give the file: --nccl FILE, or take NCCL from elsewhere: --nccl repository"
            raise ProvisionError(f"the plan takes NCCL {host.nccl.version} from {host.nccl.package}", where=host.name, hint=hint)
        return _place(downloads.check_user_file(given, host.nccl.sha256, what="the local repository package that was planned with"), folder)
    return None


def with_checksums(plan: Plan, folder: Path | None) -> Plan:
    """The plan with the checksums of the user's wheels. Only planned ones are read, since they are large."""

    @functools.cache  # hosts share the plan's objects
    def checked(torch: Wheel) -> Wheel:
        known = torch.sha256 if folder is None or torch.file is None or torch.sha256 else downloads.digest(folder / torch.file)
        return replace(torch, sha256=known)

    hosts = {
        name: replace(host, torch=checked(host.torch)) if host.torch and host.torch.file else host for name, host in plan.hosts.items()
    }
    return replace(plan, hosts=hosts)


def torch_wheel(host: HostPlan, folder: Path | None) -> Path | None:
    """The user's wheel that a host's PyTorch comes from; None where it comes from an index.

    Raises:
        ProvisionError: the wheel was given to an earlier run, and not to this one.
    """
    torch = host.torch
    if torch is None or torch.file is None:
        return None
    if folder is None or not (folder / torch.file).is_file():
        what = f"the plan takes PyTorch {torch.version} from {torch.file} (SHA-256 {torch.sha256}), which an earlier run was given"
        hint = "give the folder that holds it: --wheels DIR, or resolve everything again: --upgrade"
        raise ProvisionError(what, where=host.name, hint=hint)
    return folder / torch.file


def repository_keys(plan: Plan, folder: Path, say: Say) -> dict[str, str]:
    """The file with each repository's key, by its checksum."""
    packaged = (each for host in plan.hosts.values() for each in (host.driver, host.nccl_packages) if each is not None)
    wanted = {each.repository for each in packaged if each.repository}
    return {str(repository.key_sha256): str(_place(repository_key(repository, say), folder)) for repository in wanted}


def repository_key(repository: Repository, say: Say) -> Path:
    """The verified file with a repository's key: NVIDIA's keyring package for apt, an armoured key for dnf."""
    hint = "let this machine reach it; NCCL can come from elsewhere: --nccl wheel, or --nccl FILE; a driver cannot"
    if repository.key_sha256 is None:
        raise ProvisionError("the checksum of the repository's key is not known", where=repository.url, hint=hint)
    what = f"the key of the repository {repository.name}"
    if repository.kind == "apt":
        return downloads.fetch(repository.key_url, repository.key_sha256, what=what, hint=hint, say=say)
    # NVIDIA's checksum of an rpm key is of the file without the line that names the program which wrote it.
    path = paths.cache() / "downloads" / f"{repository.key_sha256[:12]}-{repository.name}.pub"
    if not path.exists() or downloads.digest(path) != repository.key_sha256:
        say(f"fetching {what}: {repository.key_url}")
        try:
            lines = downloads.read(repository.key_url).splitlines(keepends=True)
        except downloads.Unavailable as error:
            raise ProvisionError(f"cannot download {what}: {error}", where=repository.key_url, hint=hint) from error
        content = b"".join(line for line in lines if not line.startswith(b"Version"))
        if hashlib.sha256(content).hexdigest() != repository.key_sha256:
            raise ProvisionError(f"{what} is not the expected one; nothing of it was used", where=repository.key_url, hint=hint)
        path.parent.mkdir(parents=True, exist_ok=True)
        downloads.store(path, content)
    return path


def _place_kept(kind: builds.Kind, shares: builds.Shares, folder: Path, bundled: Path | None) -> set[str]:
    """Put cached builds into ``folder``; returns their keys."""
    folder.mkdir(exist_ok=True)
    kept = {key for key, build in shares["builds"].items() if build["sha256"]}
    for key in kept:
        _place(builds.files(kind, key, bundled)[0], folder)
    return kept


def _place(path: Path, folder: Path) -> Path:
    """Put a file into ``folder`` under its own name."""
    target = folder / path.name
    downloads.link_or_copy(path, target)
    return target.resolve()
