"""Brings wheels for another machine's Python, with all that they depend on.

pip looks at the conditions of dependencies (``python_version >= "3.12"``) with the Python that it runs under, not with the one it downloads
for. So pip only fetches here, file by file, and who depends on whom is read from the wheels.
"""

from __future__ import annotations

import email.parser
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from provision.base import downloads
from provision.base.errors import ProvisionError

_PIP_S = 1800.0  # PyTorch for CUDA is several gigabytes


@dataclass(frozen=True)
class Target:
    """The machine that the wheels are for: its Python (``3.11``), architecture, and glibc (``2.36``)."""

    python: str
    arch: str
    glibc: str

    @property
    def platforms(self) -> list[str]:
        """What its pip would take, newest first."""
        major, minor = (int(part) for part in self.glibc.split(".")[:2])
        new = [f"manylinux_{major}_{number}_{self.arch}" for number in range(minor, 4, -1)]
        return [*new, *(f"manylinux{old}_{self.arch}" for old in ("2014", "2010", "1")), f"linux_{self.arch}"]

    @property
    def markers(self) -> dict[str, str]:
        """Its answers to the conditions of dependencies."""
        return {
            "python_version": self.python,
            "python_full_version": f"{self.python}.0",
            "platform_machine": self.arch,
            "platform_system": "Linux",
            "sys_platform": "linux",
            "os_name": "posix",
            "implementation_name": "cpython",
            "platform_python_implementation": "CPython",
            "extra": "",
        }


def bring(
    pins: Iterable[str],
    target: Target,
    folder: Path,
    locked: Sequence[Mapping[str, Any]] = (),
    *,
    indexes: Mapping[str, str],
    find_links: Path | None,
    say: Callable[[str], None],
) -> list[str]:
    """Download ``pins`` and what they depend on into ``folder``; returns the files' names.

    Args:
        locked: the files that provision.lock has, each with name, version and sha256: what is among them comes as it says.
        indexes: pip's own settings, ``PIP_INDEX_URL`` and ``PIP_EXTRA_INDEX_URL``; in the environment, because they may hold a password.
        find_links: a folder of wheels to look into as well.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted: dict[str, list[str]] = {}
    found: dict[str, Path] = {}
    versions = {canonicalize_name(entry["name"]): f"=={entry['version']}" for entry in locked}

    def want(requirement: Requirement) -> None:
        name = canonicalize_name(requirement.name)
        specifiers = wanted.setdefault(name, [versions[name]] if name in versions else [])
        if str(requirement.specifier) not in specifiers:
            specifiers.append(str(requirement.specifier))

    for pin in pins:
        want(Requirement(pin))
    while missing := {name: wanted[name] for name in wanted if name not in found or not _fits(found[name], wanted[name])}:
        asked = [name + ",".join(sorted(set(filter(None, specifiers)))) for name, specifiers in missing.items()]
        say(f"wheels for Python {target.python} on {target.arch}: {', '.join(asked)}")
        scratch = folder / ".new"
        scratch.mkdir(exist_ok=True)
        download(asked, target, scratch, indexes, find_links)
        for path in sorted(scratch.iterdir()):
            brought = canonicalize_name(path.name.split("-")[0])
            if brought in found and found[brought].name != path.name:
                found[brought].unlink()
            found[brought] = path.rename(folder / path.name)
        scratch.rmdir()
        if lacking := [name for name in missing if name not in found or not _fits(found[name], missing[name])]:
            raise ProvisionError(f"no wheel fits {', '.join(f'{name} {missing[name]}' for name in lacking)} together")
        for name in missing:
            for requirement in _needs(found[name], target):
                want(requirement)
    _compare(found, locked)
    return sorted(path.name for path in found.values())


def _compare(found: Mapping[str, Path], locked: Sequence[Mapping[str, Any]]) -> None:
    """Refuse what has another checksum than the lock has for that package, as hosts would."""
    expected: dict[str, set[str]] = {}
    for entry in locked:
        expected.setdefault(canonicalize_name(entry["name"]), set()).add(entry["sha256"])
    for name, path in found.items():
        if name in expected and (sha256 := downloads.digest(path)) not in expected[name]:
            said = f"{path.name} has checksum {sha256}, but provision.lock says {' or '.join(sorted(expected[name]))}"
            raise ProvisionError(said, hint="if the index has a new file on purpose, take it with --upgrade")


def _fits(wheel: Path, specifiers: Iterable[str]) -> bool:
    version = wheel.name.split("-")[1]
    return all(Requirement("x" + specifier).specifier.contains(version, prereleases=True) for specifier in specifiers)


def _needs(wheel: Path, target: Target) -> list[Requirement]:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        metadata = email.parser.BytesParser().parsebytes(archive.read(name), headersonly=True)
    stated = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    return [one for one in stated if one.marker is None or one.marker.evaluate(target.markers)]


def download(asked: list[str], target: Target, folder: Path, indexes: Mapping[str, str], find_links: Path | None) -> None:
    """Fetch exactly these wheels with pip, without what they depend on. Raises ProvisionError."""
    command = [sys.executable, "-m", "pip", "download", "--no-input", "--no-deps", "--only-binary", ":all:", "--progress-bar", "off"]
    command += ["--dest", str(folder), "--python-version", target.python, "--implementation", "cp"]
    for platform in target.platforms:
        command += ["--platform", platform]
    if find_links:
        command += ["--find-links", str(find_links)]
    # An index that is out of reach is asked for every package again: pip's own five attempts take eight seconds each time.
    own = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_CACHE_DIR": "1", "PIP_RETRIES": os.environ.get("PIP_RETRIES", "2")}
    environment = {**os.environ, **own, **indexes}
    try:
        done = subprocess.run([*command, *asked], env=environment, capture_output=True, text=True, timeout=_PIP_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ProvisionError(f"pip did not finish in {_PIP_S:.0f} s", hint="look at the network, then run it again") from error
    if done.returncode != 0:
        errors = [line for line in (done.stderr + done.stdout).splitlines() if "ERROR" in line] or ["it said nothing"]
        raise ProvisionError(
            "pip could not bring the wheels: " + "\n".join(errors[-4:]),
            hint="name an index that has them: --index-url, --torch-index, --wheels",
        )
