"""Debian packages that a host lacks, with all that they depend on, downloaded by this machine's apt.

It works with that host's package lists, keys and record of installed packages, in a folder of its own. Signatures are checked as there.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from provision.base import aptsources, downloads
from provision.base.errors import ProvisionError
from provision.base.text import duration
from provision.install.bundle.archive import is_plain, plain_path
from provision.plan.model import Repository

#: Run on the host: prints the files that its apt goes by; those that are not there are left out.
READ_APT_FILES = (
    "cd / && tar -ch --ignore-failed-read var/lib/dpkg/status etc/apt/sources.list etc/apt/sources.list.d etc/apt/trusted.gpg.d "
    "etc/apt/keyrings etc/apt/mirrors usr/share/keyrings 2>/dev/null | gzip -1 | base64 -w 0"
)
_APT_S = 1800.0
_LARGEST_FILES = 512 << 20  # bytes of a host's files, unpacked
# How apt may fetch here what a host's lists name, and what a list of mirrors could name, too.
_SCHEMES, _DISABLED = ("copy", "file", "http", "https", "mirror+file"), ("cdrom", "ftp", "rsh", "ssh")
_SHOWN_LINES = 4
_HINT = "name a mirror that this machine reaches: --apt-mirror URL"


@dataclass(frozen=True)
class Release:
    """A host's distribution by its ``ID`` and ``VERSION_CODENAME``, and the mirror that is used instead of the host's own."""

    distribution: str
    codename: str
    mirror: aptsources.Mirror | None = None


class Apt:
    """This machine's apt with the view of a host's apt.

    The distribution's repositories and those of `add_repository` must answer. Third-party repositories need not: many can be reached from
    the host alone, as folders of its own (``file:``) or inside its network.

    Args:
        arch: the host's, as Debian names it.
        apt_files: what `READ_APT_FILES` printed there.
        work: an empty folder for it.
    """

    def __init__(self, arch: str, apt_files: str, work: Path, release: Release) -> None:
        if shutil.which("apt-get") is None:
            what = "packages for Debian and Ubuntu are gathered with apt-get, which is not on this machine"
            raise ProvisionError(what, hint="run it on a machine with Debian or Ubuntu")
        self._root, self._archives = work / "host", work / "cache/archives"
        _unpack(apt_files, self._root)
        self._needed = adapt_lists(self._root, release)
        for name in ("lists/partial", "cache/archives/partial", "empty"):
            (work / name).mkdir(parents=True)
        options = {
            **{f"Dir::Bin::methods::{name}": "false" for name in _DISABLED},
            "Dir::State::status": self._root / "var/lib/dpkg/status",
            "Dir::State::lists": work / "lists",
            "Dir::State::extended_states": work / "extended_states",
            "Dir::Cache": work / "cache",
            "Dir::Etc::sourcelist": self._root / "etc/apt/sources.list",
            "Dir::Etc::sourceparts": self._root / "etc/apt/sources.list.d",
            "Dir::Etc::trusted": work / "empty/none",
            "Dir::Etc::trustedparts": self._root / "etc/apt/trusted.gpg.d",
            "APT::Architecture": arch,
            "APT::Architectures": arch,
            "APT::Install-Recommends": "false",
            "APT::Sandbox::User": "root",
            "Debug::NoLocking": "true",
            "Acquire::Languages": "none",
            "Acquire::Retries": "1",  # the waiting for repositories that this machine does not reach adds up
            "Acquire::http::Timeout": "20",
        }
        self._command = ["apt-get", "-q", *(word for name, value in options.items() for word in ("-o", f"{name}={value}"))]

    def add_repository(self, repository: Repository, keyring_package: Path) -> None:
        """Add a vendor's repository as on the host: trusted by the key in ``keyring_package`` alone.

        One that the host has already stays as it is there: apt refuses two keys for one repository.
        """
        self._needed.append(repository.url)
        if any(repository.url.rstrip("/") in path.read_text(encoding="utf-8", errors="replace") for path in _lists(self._root)):
            return
        content = _run(["dpkg-deb", "--fsys-tarfile", str(keyring_package)], f"{keyring_package.name} cannot be read")
        with tarfile.open(fileobj=io.BytesIO(content)) as packed:
            key = packed.extractfile(f".{repository.keyring}")
            keyring = self._root / repository.keyring.lstrip("/")
            keyring.parent.mkdir(parents=True, exist_ok=True)
            keyring.write_bytes(key.read() if key else b"")
        entry = repository.entry.replace(repository.keyring, str(keyring))
        (self._root / f"etc/apt/sources.list.d/{repository.name}.list").write_text(entry.rstrip("\n") + "\n", encoding="utf-8")

    def download(self, packages: Iterable[str], folder: Path) -> list[str]:
        """Download into ``folder`` these packages, and what the host lacks of their dependencies; returns the names of the files.

        A package may be ``name=version``: that version, even if the host has or holds another. Packages that the host has are downloaded,
        too: it may have them from an earlier run, and lose them again.
        """
        words = list(packages)
        before = set(self._archives.glob("*.deb"))
        unanswered = self._update()
        exact = ["--allow-downgrades", "--allow-change-held-packages"] if any("=" in word for word in words) else []
        what = "apt could not download the packages"
        _run([*self._command, "-y", "--download-only", *exact, "install", "--reinstall", *words], what, unanswered)
        folder.mkdir(parents=True, exist_ok=True)
        names = []
        for path in sorted(set(self._archives.glob("*.deb")) - before):
            target = folder / path.name
            # Each host says by itself whom it trusts: none must change what another one gets.
            if target.exists() and downloads.digest(target) != downloads.digest(path):
                what = f"its repositories have another {path.name} than those of a host before it"
                raise ProvisionError(what, hint="make a bundle for each of them: --limit")
            shutil.copyfile(path, target)
            names.append(path.name)
        return names

    def installed_dependencies(self, packages: Iterable[str]) -> list[str]:
        """Names of ``packages`` and their dependencies, as far as the host has them."""
        nothing = self._root / "var/lib/dpkg/nothing"
        nothing.write_text("", encoding="utf-8")
        command = [*self._command, "-o", f"Dir::State::status={nothing}", "--simulate", "install", *packages]
        output = _run(command, "apt could not list the dependencies").decode("utf-8", "replace")
        needed = set(re.findall(r"^Inst (\S+) ", output, re.MULTILINE))
        status = (self._root / "var/lib/dpkg/status").read_text(encoding="utf-8", errors="replace")
        return sorted(needed & set(re.findall(r"^Package: (\S+)\nStatus: \S+ \S+ installed$", status, re.MULTILINE)))

    def _update(self) -> list[str]:
        """Read the package lists; returns apt's messages about repositories that did not answer and need not."""
        what = "apt could not read the package lists"
        output = _output(_call([*self._command, "update"], what))
        if wrong := aptsources.complaints(output, self._needed):
            raise ProvisionError(f"{what}: " + "\n".join(wrong[-_SHOWN_LINES:]), hint=_HINT)
        return [line for line in output.splitlines() if re.match(r"[EW]: (The repository|Failed to fetch) ", line)][:_SHOWN_LINES]


def _unpack(apt_files: str, root: Path) -> None:
    """Unpack the host's files, and nothing outside ``root``, for any answer."""
    try:
        content = base64.b64decode("".join(apt_files.split()), validate=True)
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as packed:
            for member in packed:
                if member.offset_data + member.size > _LARGEST_FILES:
                    raise ValueError(f"it has more than {_LARGEST_FILES >> 20} MB")
                if is_plain(member) and re.fullmatch(r"(etc/apt|var/lib/dpkg|usr/share/keyrings)(/[\w.+@~-]+)+", member.name):
                    target = root / plain_path(member.name)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with target.open("wb") as copy:
                        shutil.copyfileobj(cast(IO[bytes], packed.extractfile(member)), copy)
    except (binascii.Error, tarfile.TarError, OSError, EOFError, ValueError) as error:
        raise ProvisionError(f"its answer about packages cannot be read: {error}") from error
    if not (root / "var/lib/dpkg/status").exists():
        raise ProvisionError("its answer does not hold the list of installed packages")
    for folder in ("etc/apt/sources.list.d", "etc/apt/trusted.gpg.d"):
        (root / folder).mkdir(parents=True, exist_ok=True)


def _lists(root: Path) -> list[Path]:
    return [path for path in (root / "etc/apt/sources.list", *(root / "etc/apt/sources.list.d").iterdir()) if path.exists()]


def adapt_lists(root: Path, release: Release) -> list[str]:
    """Change the host's package lists so that they can be read here; returns the addresses of the distribution's own repositories, of a
    derived distribution those of all. Raises ProvisionError for a scheme that apt must not use here."""
    found: list[aptsources.Entry] = []
    for path in _lists(root):
        text = path.read_text(encoding="utf-8", errors="replace")
        if release.mirror is not None:
            text = aptsources.moved(text, release.mirror, release.distribution, release.codename)
        text = re.sub(r"(?m)^\s*deb\s+cdrom:.*$", "", text)  # a disc of the host's
        text = re.sub(r"(?<!\+)\bfile:/", "copy:/", text)  # from folders that are here, too, apt would not copy the packages
        found += aptsources.parse(text)
        # Keys and lists of mirrors are below ``root`` here.
        text = re.sub(r"(?i)(signed-by\s*[=:]\s*|mirror\+file:/*)/(?=(etc|usr)/)", rf"\1{root}/", text)
        path.write_text(text, encoding="utf-8")
    if other := [entry.uri for entry in found if entry.uri.partition(":")[0].lower() not in _SCHEMES]:
        what = f"invalid address in its package lists: {aptsources.without_logins(other[0])} (expected {', '.join(_SCHEMES)})"
        raise ProvisionError(what, hint="disable it in /etc/apt/sources.list.d there, or name a mirror: --apt-mirror URL")
    own = [entry.uri for entry in found if aptsources.is_own_part(entry, release.distribution, release.codename)]
    return own or [entry.uri for entry in found]


def _run(command: list[str], what: str, reasons: Iterable[str] = ()) -> bytes:
    """What ``command`` prints. Raises ProvisionError where it fails: ``what`` that means, and ``reasons`` that may have led to it."""
    done = _call(command, what)
    if done.returncode != 0:
        lines = _output(done).splitlines()
        errors = [line for line in lines if line.startswith("E:")] or lines[:_SHOWN_LINES]
        raise ProvisionError(f"{what}: " + "\n".join([*errors[-_SHOWN_LINES:], *reasons]), hint=_HINT)
    return done.stdout


def _output(done: subprocess.CompletedProcess[bytes]) -> str:
    return aptsources.without_logins((done.stderr + done.stdout).decode("utf-8", "replace"))


def _call(command: list[str], what: str) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(
            command, capture_output=True, timeout=_APT_S, check=False, stdin=subprocess.DEVNULL, env={**os.environ, "LC_ALL": "C"}
        )
    except subprocess.TimeoutExpired as error:
        raise ProvisionError(f"{what}: no end after {duration(_APT_S)}") from error
