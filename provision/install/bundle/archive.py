"""The bundle file: a tar whose first member lists every other with size and SHA-256. What does not match is refused as a whole.

bundle.json   {"schema": 5, "hosts": {NAME: BundledHost}, "lock": {...}, "data": "mnist" or "digits" or null,
               "supplies": {"openmpi_tarball": PATH, ...}, "files": {PATH: {"bytes": ..., "sha256": ...}}}
wheels/…  debs/…  cache/…  supplies/…
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tarfile
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from provision.base import downloads, tarball, validation
from provision.base.errors import ProvisionError, UsageError
from provision.base.versions import minor
from provision.install import artifacts, from_source
from provision.plan import lock_file
from provision.plan.lock import Lock
from provision.plan.model import HostPlan, Plan
from provision.plan.options import DataSource, Options, SmokeOptions
from provision.remote import ssh
from provision.remote.session import Session

SCHEMA = 5
LIST = "bundle.json"
_LIST_BYTES = 64 << 20
_FOLDERS = ("wheels", "debs", "cache", "supplies")
_FILES = {"wheels": "wheels", "nccl_wheels": "wheels", "debs": "debs", "nccl_debs": "debs"}  # a host's lists → where their files are
_INSTALLED = "dpkg-query -W -f '${db:Status-Status} ${Package}\\n'"
AGAIN = "make it again where there is a network: provision bundle HOSTS -o FILE"


def plain_path(name: str) -> str:
    """A relative path below a folder, without empty parts, ``.`` and ``..``. Raises ValueError for any other."""
    if not name.isprintable() or any(part in ("", ".", "..") for part in name.split("/")):
        raise ValueError(f"{name!r} is not the name of a file below a folder")
    return name


_Path = Annotated[str, AfterValidator(plain_path)]


class BundledHost(validation.Model):
    """What a bundle holds for one host.

    Attributes:
        machine: what the files were made for, as `machine_of` says it.
        requirements: what the plan needed, as `requirements_of` says it.
        wheels: files for the environment, and NCCL's apart, below ``wheels``.
        debs: files of system packages, and NCCL's apart, below ``debs``.
        relies_on: names of packages that are not in the bundle because the host had them.
    """

    machine: dict[Literal["system", "architecture", "Python"], str] = Field(min_length=3)
    requirements: tuple[str, ...]
    wheels: tuple[_Path, ...]
    nccl_wheels: tuple[_Path, ...]
    debs: tuple[_Path, ...]
    nccl_debs: tuple[_Path, ...]
    relies_on: tuple[str, ...]


class _File(validation.Model):
    bytes: int
    sha256: str


class _List(validation.Model):
    """``bundle.json``: it names nothing that is not in the bundle, and no two files that some file systems do not tell apart."""

    version: Literal[5] = Field(alias="schema")
    hosts: dict[str, BundledHost]
    lock: dict[str, Any]
    data: DataSource | None
    supplies: dict[str, _Path]
    files: dict[_Path, _File]

    @model_validator(mode="after")
    def _names_its_files(self) -> _List:
        named = [f"supplies/{path}" for path in self.supplies.values()]
        together = [list(self.files)]
        for host in self.hosts.values():
            for kind, place in _FILES.items():
                paths: tuple[str, ...] = getattr(host, kind)
                named += [f"{place}/{path}" for path in paths]
                together.append([path.rpartition("/")[2] for path in paths])  # the host gets them in one folder
        if missing := sorted(set(named) - set(self.files)):
            raise ValueError(f"{missing[0]!r} is not among its files")
        for names in together:
            name, count = next(iter(Counter(each.casefold() for each in names).most_common(1)), ("", 0))
            if count > 1:
                raise ValueError(f"{name!r} is in it twice")
        return self


@dataclass(frozen=True)
class Bundle:
    """A bundle whose files are in ``folder``, every one of them checked.

    Attributes:
        lock: the versions that it holds.
        data: which data set of the training job is in ``cache``; None: none.
        supplies: what the controller hands to hosts (see `artifacts.carry`) → its path below ``supplies``.
    """

    folder: Path
    hosts: Mapping[str, BundledHost]
    lock: Lock
    data: DataSource | None
    supplies: Mapping[str, str]

    def supply(self, name: str) -> Path | None:
        """A file that the controller hands to hosts; None where there is none of that name."""
        return self.folder / "supplies" / self.supplies[name] if name in self.supplies else None

    def check(self, session: Session, plan: Plan) -> None:
        """Raise UsageError where the plan needs what neither the bundle nor the host has; nothing was changed then."""
        self.check_contents(plan)
        with_root = [name for name, host in plan.hosts.items() if host.root]  # without root no packages are installed
        installed: dict[str, list[str]] = {name: [] for name in plan.hosts}
        for name, answer in ssh.run(session, dict.fromkeys(with_root, _INSTALLED)).items():
            if answer.code != 0:
                raise ProvisionError(f"its installed packages cannot be read: {answer.error}", where=name)
            installed[name] = [line.partition(" ")[2] for line in answer.out.splitlines() if line.startswith("installed ")]
        self.check_packages(plan, installed)

    def check_contents(self, plan: Plan) -> None:
        """Raise UsageError where the plan needs more than the bundle holds, or was made for another machine."""
        for name, host in plan.hosts.items():
            bundled = self.hosts.get(name)
            if bundled is None:
                raise UsageError(f"the bundle was not made for {name}", where=name, hint=AGAIN)
            for what, now in machine_of(host).items():
                if (then := bundled.machine[what]) != now:
                    raise UsageError(f"the bundle was made when its {what} was {then}, now it is {now}", where=name, hint=AGAIN)
            lacking = sorted(set(requirements_of(host)) - set(bundled.requirements))
            if lacking:
                hint = "give the options that it was made with, or " + AGAIN
                raise UsageError(f"the bundle does not hold {', '.join(lacking)}", where=name, hint=hint)

    def check_packages(self, plan: Plan, installed: Mapping[str, Collection[str]]) -> None:
        """Raise UsageError where system packages are neither in the bundle nor ``installed`` (host → names)."""
        for name, host in plan.hosts.items():
            bundled = self.hosts[name]
            nccl = host.nccl_packages.packages if host.nccl_packages else ()
            needed = {*map(package_name, (*host.packages, *nccl)), *bundled.relies_on}
            lacking = sorted(needed - {package_name(file) for file in (*bundled.debs, *bundled.nccl_debs)} - set(installed[name]))
            if lacking:
                what = f"the bundle lacks packages that are not installed there: {', '.join(lacking)}"
                hint = "make a new one where there is a network, of this host as it is now: provision bundle HOSTS -o FILE"
                raise UsageError(what, where=name, hint=hint)

    def complete(self, options: Options) -> Options:
        """The options with the files that the bundle was made with, where none are given, and without downloads."""
        nccl_sources = self.supply("nccl_tarball")
        return replace(
            options,
            nccl_local=options.nccl_local or self.supply("nccl_local"),
            nccl_tarball=options.nccl_tarball or (tarball.nccl(nccl_sources) if nccl_sources else None),
            openmpi_tarball=options.openmpi_tarball or self.supply("openmpi_tarball"),
            python_downloads=False,
        )

    def complete_files(self, files: artifacts.UserFiles) -> artifacts.UserFiles:
        """The user's files, with the sources that were fetched for the bundle where none are given."""
        return replace(
            files,
            nccl_tarball=files.nccl_tarball or self.supply("nccl_sources"),
            openmpi_tarball=files.openmpi_tarball or self.supply("openmpi_sources"),
        )

    def complete_smoke(self, options: SmokeOptions) -> SmokeOptions:
        """The smoke job's options with the bundle's data, where it has them and none are given."""
        return replace(options, cache=self.folder / "cache", source=self.data) if self.data and options.data is None else options

    def archives(self, target: Path) -> dict[str, dict[str, str]]:
        """Host → {archive, sha256}: its files in one archive, because a copy per file takes a second per file and host.

        Hosts that get the same share the archive, in ``target``; the same files make the same bytes.
        """
        made: dict[tuple[tuple[str, str], ...], dict[str, str]] = {}
        found = {}
        for name, host in self.hosts.items():
            files = (
                *(("wheels", f"wheels/{file}") for file in sorted(host.wheels)),
                *(("nccl_wheels", f"wheels/{file}") for file in sorted(host.nccl_wheels)),
                *(("debs", f"debs/{file}") for file in sorted({*host.debs, *host.nccl_debs})),
            )
            if files not in made:
                target.mkdir(parents=True, exist_ok=True)
                archive = target / f"bundle-{len(made)}.tar"
                with tarfile.open(archive, "w") as packed:
                    for there, file in files:
                        packed.add(self.folder / file, f"{there}/{Path(file).name}", filter=_normalised)
                made[files] = {"archive": str(archive), "sha256": downloads.digest(archive)}
            found[name] = made[files]
        return found


def _normalised(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.mtime, member.mode, member.uid, member.gid, member.uname, member.gname = 0, 0o644, 0, 0, "root", "root"
    return member


def package_name(text: str) -> str:
    """The package of ``g++_4%3a12.2.0-3_amd64.deb`` and of ``libnccl2=2.21.5-1+cuda12.4``."""
    return re.split(r"[_=]", text, maxsplit=1)[0]


def machine_of(host: HostPlan) -> dict[Literal["system", "architecture", "Python"], str]:
    """What files are made for: packages for the system, wheels for the Python, and both for the architecture."""
    return {"system": host.system, "architecture": host.arch, "Python": minor(host.python.version)}


def requirements_of(host: HostPlan) -> list[str]:
    """What a host's plan needs from outside: pins of wheels, system packages, and what the controller hands to it."""
    components = [host.numpy, host.openmpi, host.cmake, host.nccl, host.mpi4py, host.cloudpickle, host.torch]
    pins = [
        one.package for one in components if one is not None and "==" in one.package and one.source in ("wheel", "index", "folder", "host")
    ]
    own = host.nccl_packages
    nccl = [] if own is None else [*own.packages, *([own.package] if own.source == "local_repository" else [])]
    sources = [f"the sources of {each.title} {found.version}" for each in from_source.RECIPES if (found := each.of(host))]
    return [*pins, *host.packages, *nccl, *sources]


def pack(folder: Path, listing: Mapping[str, object], target: Path) -> None:
    """Write ``folder`` with its ``listing`` (hosts, lock, data, supplies) into ``target``, in one step."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    files = {name: {"bytes": (folder / name).stat().st_size, "sha256": downloads.digest(folder / name)} for name in names}
    (folder / LIST).write_text(json.dumps({"schema": SCHEMA, **listing, "files": files}, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with tarfile.open(draft, "w") as packed:
            for name in [LIST, *names]:
                packed.add(folder / name, name, recursive=False)
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)


def unpack(path: Path, folder: Path) -> Bundle:
    """Check every file of a bundle and put it into ``folder``. Raises UsageError for one that is damaged or changed: nothing is used."""
    try:
        with tarfile.open(path, "r:") as packed:
            listing = _read_list(packed, path)
            missing = dict(listing.files)
            while (member := packed.next()) is not None:  # those after the list
                stated = missing.pop(member.name, None)
                if stated is None or not is_plain(member) or member.name.partition("/")[0] not in _FOLDERS:
                    raise _refused(path, f"it holds {member.name!r}, which is not in its list")
                if member.size != stated.bytes:
                    raise _refused(path, f"{member.name!r} has {member.size} bytes, its list says {stated.bytes}")
                source, target = packed.extractfile(member), folder / member.name
                target.parent.mkdir(parents=True, exist_ok=True)
                digest = hashlib.sha256()
                with target.open("xb") as file:
                    while source is not None and (block := source.read(1 << 20)):
                        digest.update(block)
                        file.write(block)
                if digest.hexdigest() != stated.sha256:
                    raise _refused(path, f"{member.name!r} has checksum {digest.hexdigest()}, its list says {stated.sha256}")
        if missing:
            raise _refused(path, f"{next(iter(missing))!r} is missing")
        return Bundle(folder, listing.hosts, lock_file.parse(listing.lock), listing.data, listing.supplies)
    except (OSError, tarfile.TarError) as error:
        raise UsageError(f"cannot be read as a bundle: {getattr(error, 'strerror', None) or error}", where=str(path), hint=AGAIN) from error
    except ValueError as error:
        raise _refused(path, f"its list is damaged: {error}") from error


def _read_list(packed: tarfile.TarFile, path: Path) -> _List:
    first = packed.next()
    fits = first is not None and first.name == LIST and is_plain(first) and first.size < _LIST_BYTES
    file = packed.extractfile(first) if first is not None and fits else None
    if file is None:
        raise UsageError("is not a bundle of provision", where=str(path), hint=AGAIN)
    try:
        document = validation.read(validation.decoded(file.read(), LIST), LIST)
        schema = document.get("schema") if isinstance(document, dict) else None
        if schema != SCHEMA:
            raise UsageError(f"invalid schema {schema!r}: expected {SCHEMA}", where=str(path), hint=AGAIN)
        return validation.validate(_List, document, LIST)
    except UsageError as error:
        raise error if error.where == str(path) else _refused(path, f"its list is damaged: {error.what}") from error


def _refused(path: Path, why: str) -> UsageError:
    what = f"the bundle was damaged or changed: {why}; nothing of it was used"
    return UsageError(what, where=str(path), hint=f"copy it again, or {AGAIN}")


def is_plain(member: tarfile.TarInfo) -> bool:
    """Whether a member of an archive is a file whose content is in there: no link, no device, none that is larger than what was sent."""
    return member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not member.issparse()
