"""The bundle file: a tar whose first member lists every other with size and SHA-256. What does not match is refused as a whole.

bundle.json   {"schema": 5,
               "hosts": {NAME: {"machine": {"system": ..., "architecture": ..., "Python": ...}, "requirements": [...],
                                "wheels": [...], "nccl_wheels": [...], "debs": [...], "nccl_debs": [...], "relies_on": [...]}},
               "lock": {...}, "data": "mnist" or "digits" or null, "supplies": {"openmpi_tarball": PATH, ...},
               "files": {PATH: {"bytes": ..., "sha256": ...}}}
wheels/…  debs/…  cache/…  supplies/…
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tarfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from provision.base import downloads
from provision.base.errors import UsageError
from provision.base.versions import minor
from provision.install import from_source
from provision.plan import lock_file
from provision.plan.lock import Lock
from provision.plan.model import HostPlan, Plan
from provision.plan.options import DataSource

SCHEMA = 5
LIST = "bundle.json"
_LIST_BYTES = 64 << 20
_FOLDERS = ("wheels", "debs", "cache", "supplies")
_MACHINE = {"system", "architecture", "Python"}  # what `machine_of` says
_FILES = {"wheels": "wheels", "nccl_wheels": "wheels", "debs": "debs", "nccl_debs": "debs"}  # a host's lists → where their files lie
AGAIN = "make it again where there is a network: provision bundle HOSTS -o FILE"


@dataclass(frozen=True)
class Bundle:
    """A bundle whose files lie in ``folder``, every one of them checked.

    Attributes:
        hosts: host → {machine, requirements, wheels, nccl_wheels, debs, nccl_debs, relies_on}: what it was made for, the names of its
            files, and those of packages that it does without because the host had them.
        lock: the versions that it holds.
        data: which data set of the training job is in ``cache``; None: none.
        supplies: what the controller hands out → its path below ``supplies``.
    """

    folder: Path
    hosts: Mapping[str, Mapping[str, Any]]
    lock: Lock
    data: DataSource | None
    supplies: Mapping[str, str]

    def supply(self, what: str) -> Path | None:
        """The file of that kind among those that the controller hands out (see `artifacts.carry`); None: there is none."""
        return self.folder / "supplies" / self.supplies[what] if what in self.supplies else None

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    def must_hold(self, plan: Plan) -> None:
        """Raise UsageError when the plan needs what is not in it; nothing has been touched then."""
        for name, host in plan.hosts.items():
            made_for = self.hosts.get(name)
            if made_for is None:
                raise UsageError(f"the bundle was not made for {name}", where=name, hint=AGAIN)
            for what, now in machine_of(host).items():
                if (then := made_for["machine"][what]) != now:
                    raise UsageError(f"the bundle was made when its {what} was {then}, now it is {now}", where=name, hint=AGAIN)
            lacking = sorted(set(requirements_of(host)) - set(made_for["requirements"]))
            if lacking:
                hint = "give the options that it was made with, or " + AGAIN
                raise UsageError(f"the bundle does not hold {', '.join(lacking)}", where=name, hint=hint)

    def must_complete(self, plan: Plan, there: Mapping[str, Collection[str]]) -> None:
        """Raise UsageError when the packages of a host's plan could not be installed with it; nothing has been touched then.

        Args:
            there: host → the names of its installed packages.
        """
        for name, host in plan.hosts.items():
            made_for = self.hosts[name]
            brought = {name_of_package(file) for file in (*made_for["debs"], *made_for["nccl_debs"])}
            needed = {
                *map(name_of_package, (*host.packages, *(host.nccl_packages.packages if host.nccl_packages else ()))),
                *made_for["relies_on"],
            }
            if lacking := sorted(needed - brought - set(there[name])):
                listed = ", ".join(lacking[:8]) + (f" and {len(lacking) - 8} more" if len(lacking) > 8 else "")
                what = f"the bundle lacks packages that are not installed there: {listed}"
                hint = "make a new one where there is a network, of this host as it is now: provision bundle HOSTS -o FILE"
                raise UsageError(what, where=name, hint=hint)

    def parcels(self, target: Path) -> dict[str, dict[str, str]]:
        """Host → {archive, sha256}: what goes to it, as one file, because a copy per file takes a second per file and host.

        Hosts that get the same share the file, in ``target``; the same files make the same bytes.
        """
        made: dict[tuple[tuple[str, str], ...], dict[str, str]] = {}
        found = {}
        for name, given in self.hosts.items():
            files = (
                *(("wheels", f"wheels/{file}") for file in sorted(given["wheels"])),
                *(("nccl_wheels", f"wheels/{file}") for file in sorted(given["nccl_wheels"])),
                *(("debs", f"debs/{file}") for file in sorted({*given["debs"], *given["nccl_debs"]})),
            )
            if files not in made:
                target.mkdir(parents=True, exist_ok=True)
                archive = target / f"bundle-{len(made)}.tar"
                with tarfile.open(archive, "w") as packed:
                    for there, file in files:
                        packed.add(self.folder / file, f"{there}/{Path(file).name}", filter=_nobodys)
                made[files] = {"archive": str(archive), "sha256": downloads.digest(archive)}
            found[name] = made[files]
        return found


def _nobodys(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.mtime, member.mode, member.uid, member.gid, member.uname, member.gname = 0, 0o644, 0, 0, "root", "root"
    return member


def name_of_package(word: str) -> str:
    """Of ``g++_4%3a12.2.0-3_amd64.deb`` and of ``libnccl2=2.21.5-1+cuda12.4``."""
    return re.split(r"[_=]", word, maxsplit=1)[0]


def machine_of(host: HostPlan) -> dict[str, str]:
    """What files are made for: packages for the system, wheels for the Python, and both for the architecture."""
    return {"system": host.system, "architecture": host.arch, "Python": minor(host.python.version)}


def requirements_of(host: HostPlan) -> list[str]:
    """What a host's plan needs from outside: pins for pip, system packages, and what the controller hands out."""
    components = [host.numpy, host.openmpi, host.cmake, host.nccl, host.mpi4py, host.cloudpickle, host.torch]
    pins = [
        one.package for one in components if one is not None and "==" in one.package and one.source in ("wheel", "index", "folder", "host")
    ]
    own = host.nccl_packages
    nccl = [] if own is None else [*own.packages, *([own.package] if own.source == "local_repository" else [])]
    sources = [f"the sources of {each.title} {found.version}" for each in from_source.RECIPES if (found := each.of(host))]
    return [*pins, *host.packages, *nccl, *sources]


def pack(folder: Path, listing: Mapping[str, Any], target: Path) -> None:
    """Write ``folder`` with its ``listing`` into ``target``, in one step."""
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
    """Check every file of a bundle and lay it into ``folder``. Raises UsageError for one that is damaged or changed: nothing is used."""
    try:
        with tarfile.open(path, "r:") as packed:
            listing = _listing(packed, path)
            missing: dict[str, Any] = dict(listing["files"])
            while (member := packed.next()) is not None:  # those after the list
                stated = missing.pop(member.name, None)
                if stated is None or not is_plain(member) or member.name.partition("/")[0] not in _FOLDERS:
                    raise _refused(path, f"it holds {member.name!r}, which is not in its list")
                if member.size != stated["bytes"]:
                    raise _refused(path, f"{member.name!r} has {member.size} bytes, its list says {stated['bytes']}")
                source, target = packed.extractfile(member), path_in(folder, member.name)
                target.parent.mkdir(parents=True, exist_ok=True)
                digest = hashlib.sha256()
                with target.open("xb") as file:
                    while source is not None and (block := source.read(1 << 20)):
                        digest.update(block)
                        file.write(block)
                if digest.hexdigest() != stated["sha256"]:
                    raise _refused(path, f"{member.name!r} has checksum {digest.hexdigest()}, its list says {stated['sha256']}")
            if missing:
                raise _refused(path, f"{next(iter(missing))!r} is missing")
        _check(listing, folder)
        return Bundle(folder, listing["hosts"], lock_file.parse(listing["lock"]), listing["data"], listing["supplies"])
    except (OSError, tarfile.TarError) as error:
        raise UsageError(f"cannot be read as a bundle: {error}", where=str(path), hint=AGAIN) from error
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise _refused(path, f"its list is damaged ({type(error).__name__}: {error})") from error


def _check(listing: Mapping[str, Any], folder: Path) -> None:
    """Raise KeyError, TypeError or ValueError for a list that would surprise those who read it: it names what is not in the bundle."""
    _once(listing["files"])
    for host in listing["hosts"].values():
        if set(host["machine"]) != _MACHINE or any(type(host[kind]) is not list for kind in (*_FILES, "requirements", "relies_on")):
            raise TypeError("a host has a machine's system, architecture and Python, and lists")
        if any(type(text) is not str for text in (*host["machine"].values(), *host["requirements"], *host["relies_on"])):
            raise TypeError("a host's machine, requirements and packages are texts")
        for kind, place in _FILES.items():
            _once(name.rpartition("/")[2] for name in host[kind])  # the hosts get them in one folder
            for name in host[kind]:
                _must_hold(listing, folder, place, name)
    for name in listing["supplies"].values():
        _must_hold(listing, folder, "supplies", name)
    if listing["data"] not in (None, *get_args(DataSource)):
        raise ValueError(f"there are no data called {listing['data']!r}")


def _once(names: Iterable[str]) -> None:
    """Raise ValueError for names that some file systems do not tell apart."""
    seen: set[str] = set()
    for name in names:
        if name.casefold() in seen:
            raise ValueError(f"{name!r} is in it twice")
        seen.add(name.casefold())


def _must_hold(listing: Mapping[str, Any], folder: Path, place: str, name: str) -> None:
    path_in(folder / place, name)
    if f"{place}/{name}" not in listing["files"]:
        raise ValueError(f"{name!r} is said to be among its {place}, and is not in it")


def _listing(packed: tarfile.TarFile, path: Path) -> dict[str, Any]:
    first = packed.next()
    fits = first is not None and first.name == LIST and is_plain(first) and first.size < _LIST_BYTES
    file = packed.extractfile(first) if first is not None and fits else None
    if file is None:
        raise UsageError("is no bundle of provision", where=str(path), hint=AGAIN)
    listing: dict[str, Any] = json.loads(file.read())
    if listing["schema"] != SCHEMA:
        raise UsageError(f"is a bundle of schema {listing['schema']!r}, this version reads {SCHEMA}", where=str(path), hint=AGAIN)
    return listing


def _refused(path: Path, why: str) -> UsageError:
    return UsageError(
        f"the bundle was damaged or changed: {why}; nothing of it was used", where=str(path), hint=f"copy it again, or {AGAIN}"
    )


def path_in(folder: Path, name: str) -> Path:
    """Where ``name`` leads from ``folder``.

    Raises:
        ValueError: that is not below the folder, by its words or by a link that is there; or there are two ways to write it.
    """
    if not isinstance(name, str) or not name.isprintable() or any(part in ("", ".", "..") for part in name.split("/")):
        raise ValueError(f"{name!r} is not the name of a file below a folder")
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{name!r} leads out of its folder")
    return path


def is_plain(member: tarfile.TarInfo) -> bool:
    """Whether a member of an archive is a file whose content is in there: no link, no device, none that is larger than what was sent."""
    return member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not member.issparse()
