"""Brings the packages that a Debian or Ubuntu host lacks, with all that they depend on: the controller's apt works with that host's
package lists, keys and record of what is installed, in a folder of its own. Signatures are checked as on the host itself."""

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
from provision.catalog import architectures
from provision.install.bundle.archive import is_plain, path_in
from provision.plan.model import Repository

# Run on the host: what its apt goes by. A read-only look; what is not there is left out.
LOOK = (
    "cd / && tar -ch --ignore-failed-read var/lib/dpkg/status etc/apt/sources.list etc/apt/sources.list.d etc/apt/trusted.gpg.d "
    "etc/apt/keyrings etc/apt/mirrors usr/share/keyrings 2>/dev/null | gzip -1 | base64 -w 0"
)
_APT_S = 1800.0
_SHOWN_LINES = 4
_TODO = "name a mirror that this machine reaches: --apt-mirror URL"


@dataclass(frozen=True)
class Release:
    """A host's distribution by its ``ID`` and ``VERSION_CODENAME``, and the mirror of it that takes the place of the host's own."""

    distribution: str
    codename: str
    mirror: aptsources.Mirror | None = None


class Apt:
    """This machine's apt, seeing what a host's apt would see.

    Its distribution and what `know` names must answer. Repositories of third parties need not: many can be reached from the host alone, as
    folders of its own (``file:``) or inside its network.

    Args:
        arch: the host's, as the kernel names it.
        seen: what `LOOK` printed there.
        work: an empty folder for it.
    """

    def __init__(self, arch: str, seen: str, work: Path, release: Release) -> None:
        if shutil.which("apt-get") is None:
            raise ProvisionError(
                "packages for Debian and Ubuntu are gathered with apt-get, which is not on this machine", hint="run it on one of them"
            )
        self._root, self._archives = work / "host", work / "cache/archives"
        _unpack(seen, self._root)
        self._needed = _lay_out(self._root, release)
        for name in ("lists/partial", "cache/archives/partial", "empty"):
            (work / name).mkdir(parents=True)
        options = {
            "Dir::State::status": self._root / "var/lib/dpkg/status",
            "Dir::State::lists": work / "lists",
            "Dir::State::extended_states": work / "extended_states",
            "Dir::Cache": work / "cache",
            "Dir::Etc::sourcelist": self._root / "etc/apt/sources.list",
            "Dir::Etc::sourceparts": self._root / "etc/apt/sources.list.d",
            "Dir::Etc::trusted": work / "empty/none",
            "Dir::Etc::trustedparts": self._root / "etc/apt/trusted.gpg.d",
            "APT::Architecture": architectures.debian_name(arch),
            "APT::Architectures": architectures.debian_name(arch),
            "APT::Install-Recommends": "false",
            "APT::Sandbox::User": "root",
            "Debug::NoLocking": "true",
            "Acquire::Languages": "none",
            "Acquire::Retries": "1",  # with repositories that cannot be reached from here the waiting adds up
            "Acquire::http::Timeout": "20",
        }
        self._command = ["apt-get", "-q", *(word for name, value in options.items() for word in ("-o", f"{name}={value}"))]

    def know(self, repository: Repository, keyring_package: Path) -> None:
        """Tell it of a vendor's repository, as the host would be told: believed by the key in ``keyring_package`` alone.

        One that the host knows already stays as it is there: apt refuses two keys for one repository.
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

    def bring(self, packages: Iterable[str], folder: Path) -> list[str]:
        """Download into ``folder`` these packages, and what the host lacks of what they need; returns the names of the files.

        A package may be ``name=version``: that version, whatever the host has or holds. One that the host has already comes, too: it may
        have it from an earlier run, and lose it again.
        """
        words = list(packages)
        before = set(self._archives.glob("*.deb"))
        silent = self._update()
        exact = ["--allow-downgrades", "--allow-change-held-packages"] if any("=" in word for word in words) else []
        what = "apt could not bring the packages"
        _run([*self._command, "-y", "--download-only", *exact, "install", "--reinstall", *words], what, silent)
        folder.mkdir(parents=True, exist_ok=True)
        names = []
        for path in sorted(set(self._archives.glob("*.deb")) - before):
            _keep(path, folder)
            names.append(path.name)
        return names

    def rely_on(self, packages: Iterable[str]) -> list[str]:
        """Names of what ``packages`` need, themselves among it, and the host has."""
        nothing = self._root / "var/lib/dpkg/nothing"
        nothing.write_text("", encoding="utf-8")
        command = [*self._command, "-o", f"Dir::State::status={nothing}", "--simulate", "install", *packages]
        said = _run(command, "apt could not say what the packages need").decode("utf-8", "replace")
        needed = set(re.findall(r"^Inst (\S+) ", said, re.MULTILINE))
        status = (self._root / "var/lib/dpkg/status").read_text(encoding="utf-8", errors="replace")
        found = re.findall(r"^Package: (\S+)\nStatus: \S+ \S+ installed$", status, re.MULTILINE)
        return sorted(needed & set(found))

    def _update(self) -> list[str]:
        """Read the package lists; returns what apt says of repositories that did not answer and need not."""
        done = _call([*self._command, "update"], "apt could not read the package lists")
        said = _said(done)
        if wrong := aptsources.complaints(said, self._needed):
            raise ProvisionError("apt could not read the package lists: " + "\n".join(wrong[-_SHOWN_LINES:]), hint=_TODO)
        return [line for line in said.splitlines() if re.match(r"[EW]: (The repository|Failed to fetch) ", line)][:_SHOWN_LINES]


def _keep(path: Path, folder: Path) -> None:
    """Lay a package among those of all hosts. Each host says by itself whom it believes: none must change what another one gets.

    Raises:
        ProvisionError: another one of that name is there, which another host believed.
    """
    target = folder / path.name
    if target.exists() and downloads.digest(target) != downloads.digest(path):
        what = f"its repositories have another {path.name} than those of a host before it"
        raise ProvisionError(what, hint="make a bundle for each of them: --limit")
    shutil.copyfile(path, target)


def _unpack(seen: str, root: Path) -> None:
    """The host's files, and nothing that its answer would put elsewhere."""
    try:
        content = base64.b64decode("".join(seen.split()), validate=True)
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as packed:
            for member in packed:
                if is_plain(member) and re.fullmatch(r"(etc/apt|var/lib/dpkg|usr/share/keyrings)(/[\w.+@~-]+)+", member.name):
                    target = path_in(root, member.name)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    file = packed.extractfile(member)
                    with target.open("wb") as copy:
                        shutil.copyfileobj(cast(IO[bytes], file), copy)
    except (binascii.Error, tarfile.TarError, OSError, EOFError, ValueError) as error:
        raise ProvisionError(f"what it says of its packages cannot be read: {error}") from error
    if not (root / "var/lib/dpkg/status").exists():
        raise ProvisionError("it did not say which packages it has")
    for folder in ("etc/apt/sources.list.d", "etc/apt/trusted.gpg.d"):
        (root / folder).mkdir(parents=True, exist_ok=True)


def _lists(root: Path) -> list[Path]:
    return [path for path in (root / "etc/apt/sources.list", *(root / "etc/apt/sources.list.d").iterdir()) if path.exists()]


def _lay_out(root: Path, release: Release) -> list[str]:
    """Have its package sources read as they must here; returns the addresses of the distribution's own, of a derived one all."""
    found = []
    for path in _lists(root):
        text = path.read_text(encoding="utf-8", errors="replace")
        if release.mirror is not None:
            text = aptsources.moved(text, release.mirror, release.distribution, release.codename)
        text = re.sub(r"(?<!\+)\bfile:/", "copy:/", text)  # of folders that are here, too, apt would leave the packages where they lie
        found += [*aptsources.parse_list(text), *aptsources.parse_deb822(text)]
        # Keys and lists of mirrors lie elsewhere here.
        text = re.sub(r"(?i)(signed-by\s*[=:]\s*|mirror\+file:/*)/(?=(etc|usr)/)", rf"\1{root}/", text)
        path.write_text(text, encoding="utf-8")
    own = [entry.uri for entry in found if aptsources.is_own_part(entry, release.distribution, release.codename)]
    return own or [entry.uri for entry in found]


def _run(command: list[str], what: str, besides: Iterable[str] = ()) -> bytes:
    """What ``command`` prints; ``what`` says what it means that it failed, ``besides`` what may be the reason."""
    done = _call(command, what)
    if done.returncode != 0:
        said = _said(done).splitlines()
        errors = [line for line in said if line.startswith("E:")] or said[:_SHOWN_LINES]
        raise ProvisionError(f"{what}: " + "\n".join([*errors[-_SHOWN_LINES:], *besides]), hint=_TODO)
    return done.stdout


def _said(done: subprocess.CompletedProcess[bytes]) -> str:
    return aptsources.without_logins((done.stderr + done.stdout).decode("utf-8", "replace"))


def _call(command: list[str], what: str) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(
            command, capture_output=True, timeout=_APT_S, check=False, stdin=subprocess.DEVNULL, env={**os.environ, "LC_ALL": "C"}
        )
    except subprocess.TimeoutExpired as error:
        raise ProvisionError(f"{what}: no end after {_APT_S:.0f} s") from error
