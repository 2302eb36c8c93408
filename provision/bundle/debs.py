"""Brings the packages that a Debian or Ubuntu host lacks, with all that they depend on: the controller's apt works with that host's
package lists, keys and record of what is installed, in a folder of its own. Signatures are checked as on the host itself."""

from __future__ import annotations

import base64
import binascii
import io
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path

from provision.errors import ProvisionError
from provision.plan import Repository

# Run on the host: what its apt goes by. A read-only look; what is not there is left out.
LOOK = (
    "cd / && tar -ch --ignore-failed-read var/lib/dpkg/status etc/apt/sources.list etc/apt/sources.list.d etc/apt/trusted.gpg.d "
    "etc/apt/keyrings usr/share/keyrings 2>/dev/null | gzip -1 | base64 -w 0"
)
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_APT_S = 1800.0


class Apt:
    """This machine's apt, seeing what a host's apt would see.

    Args:
        arch: the host's, as the kernel names it.
        seen: what `LOOK` printed there.
        work: an empty folder for it.
        elsewhere: reads a list of its package sources and says how it reads with the mirror that is to be used; as it is by default.
    """

    def __init__(self, arch: str, seen: str, work: Path, elsewhere: Callable[[str], str] = str) -> None:
        if shutil.which("apt-get") is None:
            raise ProvisionError(
                "packages for Debian and Ubuntu are gathered with apt-get, which is not on this machine", todo="run it on one of them"
            )
        self._root, self._archives = work / "host", work / "cache/archives"
        _unpack(seen, self._root)
        for name in ("lists/partial", "cache/archives/partial", "empty"):
            (work / name).mkdir(parents=True)
        options = {
            "Dir::State::status": self._root / "var/lib/dpkg/status",
            "Dir::State::lists": work / "lists",
            "Dir::State::extended_states": work / "extended_states",
            "Dir::Cache": work / "cache",
            "Dir::Etc::sourcelist": _sources(self._root, elsewhere),
            "Dir::Etc::sourceparts": self._root / "etc/apt/sources.list.d",
            "Dir::Etc::trusted": work / "empty/none",
            "Dir::Etc::trustedparts": self._root / "etc/apt/trusted.gpg.d",
            "APT::Architecture": _ARCHITECTURES.get(arch, arch),
            "APT::Architectures": _ARCHITECTURES.get(arch, arch),
            "APT::Install-Recommends": "false",
            "APT::Sandbox::User": "root",
            "APT::Update::Error-Mode": "any",
            "Debug::NoLocking": "true",
            "Acquire::Languages": "none",
        }
        self._command = ["apt-get", "-q", *(word for name, value in options.items() for word in ("-o", f"{name}={value}"))]

    def know(self, repository: Repository, keyring_package: Path) -> None:
        """Tell it of a vendor's repository, as the host would be told: believed by the key in ``keyring_package`` alone.

        One that the host knows already stays as it is there: apt refuses two keys for one repository.
        """
        lists = [self._root / "etc/apt/sources.list", *(self._root / "etc/apt/sources.list.d").iterdir()]
        if any(repository.url.rstrip("/") in path.read_text(encoding="utf-8", errors="replace") for path in lists if path.exists()):
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
        """Download into ``folder`` what the host lacks of ``packages``, beyond what was brought before; returns the files' names.

        A package may be ``name=version``: that version, whatever the host has or holds.
        """
        words = list(packages)
        before = set(self._archives.glob("*.deb"))
        _run([*self._command, "update"], "apt could not read the package lists")
        exact = ["--allow-downgrades", "--allow-change-held-packages"] if any("=" in word for word in words) else []
        _run([*self._command, "-y", "--download-only", *exact, "install", *words], "apt could not bring the packages")
        folder.mkdir(parents=True, exist_ok=True)
        names = []
        for path in sorted(set(self._archives.glob("*.deb")) - before):
            shutil.copyfile(path, folder / path.name)
            names.append(path.name)
        return names


def _unpack(seen: str, root: Path) -> None:
    """The host's files, and nothing that its answer would put elsewhere."""
    try:
        content = base64.b64decode("".join(seen.split()), validate=True)
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as packed:
            for member in packed:
                if member.isfile() and re.fullmatch(r"(etc/apt|var/lib/dpkg|usr/share/keyrings)(/[\w.+@~-]+)+", member.name):
                    if ".." in member.name.split("/"):
                        continue
                    target = root / member.name
                    target.parent.mkdir(parents=True, exist_ok=True)
                    file = packed.extractfile(member)
                    target.write_bytes(file.read() if file else b"")
    except (binascii.Error, tarfile.TarError, OSError, EOFError) as error:
        raise ProvisionError(f"what it says of its packages cannot be read: {error}") from error
    if not (root / "var/lib/dpkg/status").exists():
        raise ProvisionError("it did not say which packages it has")
    for folder in ("etc/apt/sources.list.d", "etc/apt/trusted.gpg.d"):
        (root / folder).mkdir(parents=True, exist_ok=True)


def _sources(root: Path, elsewhere: Callable[[str], str]) -> Path:
    """Its package sources, with its keys where they lie here."""
    listed = [root / "etc/apt/sources.list", *(root / "etc/apt/sources.list.d").iterdir()]
    for path in listed:
        if path.exists():
            text = path.read_text(encoding="utf-8", errors="replace")
            text = re.sub(r"(?i)(signed-by\s*[=:]\s*)/(?=(etc|usr)/)", rf"\1{root}/", text)
            path.write_text(elsewhere(text), encoding="utf-8")
    return listed[0]


def _run(command: list[str], what: str) -> bytes:
    """What ``command`` prints; ``what`` says what it means that it failed."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=_APT_S, check=False, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as error:
        raise ProvisionError(f"{what}: no end after {_APT_S:.0f} s") from error
    if done.returncode != 0:
        said = (done.stderr + done.stdout).decode("utf-8", "replace").splitlines()
        errors = [line for line in said if line.startswith("E:")] or done.stderr.decode("utf-8", "replace").splitlines()[-3:]
        raise ProvisionError(f"{what}: " + "\n".join(errors[-4:]), todo="name a mirror that this machine reaches: --apt-mirror URL")
    return done.stdout
