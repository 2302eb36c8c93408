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
from collections.abc import Iterable
from pathlib import Path

from provision.errors import ProvisionError

# Run on the host: what its apt goes by. A read-only look; what is not there is left out.
LOOK = (
    "cd / && tar -ch --ignore-failed-read var/lib/dpkg/status etc/apt/sources.list etc/apt/sources.list.d etc/apt/trusted.gpg.d "
    "etc/apt/keyrings usr/share/keyrings 2>/dev/null | gzip -1 | base64 -w 0"
)
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_APT_S = 1800.0


def bring(packages: Iterable[str], arch: str, seen: str, work: Path, folder: Path, mirror: str | None = None) -> list[str]:
    """Download what the host lacks of ``packages`` into ``folder``; returns the files' names.

    Args:
        arch: the host's, as the kernel names it.
        seen: what `LOOK` printed there.
        work: an empty folder for apt.
        mirror: take the distribution from here instead of where the host does.
    """
    if shutil.which("apt-get") is None:
        raise ProvisionError(
            "packages for Debian and Ubuntu are gathered with apt-get, which is not on this machine", todo="run it on one of them"
        )
    root = work / "host"
    _unpack(seen, root)
    sources = _sources(root, mirror)
    for name in ("lists/partial", "cache/archives/partial", "empty"):
        (work / name).mkdir(parents=True)
    options = {
        "Dir::State::status": root / "var/lib/dpkg/status",
        "Dir::State::lists": work / "lists",
        "Dir::State::extended_states": work / "extended_states",
        "Dir::Cache": work / "cache",
        "Dir::Etc::sourcelist": sources,
        "Dir::Etc::sourceparts": root / "etc/apt/sources.list.d",
        "Dir::Etc::trusted": work / "empty/none",
        "Dir::Etc::trustedparts": root / "etc/apt/trusted.gpg.d",
        "APT::Architecture": _ARCHITECTURES.get(arch, arch),
        "APT::Architectures": _ARCHITECTURES.get(arch, arch),
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "root",
        "APT::Update::Error-Mode": "any",
        "Debug::NoLocking": "true",
        "Acquire::Languages": "none",
    }
    apt = ["apt-get", "-q", *(word for name, value in options.items() for word in ("-o", f"{name}={value}"))]
    _run([*apt, "update"], "apt could not read the package lists")
    _run([*apt, "-y", "--download-only", "install", *packages], "apt could not bring the packages")
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for path in sorted((work / "cache/archives").glob("*.deb")):
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


def _sources(root: Path, mirror: str | None) -> Path:
    """Its package sources, with its keys where they lie here."""
    listed = [root / "etc/apt/sources.list", *(root / "etc/apt/sources.list.d").iterdir()]
    for path in listed:
        if path.exists():
            text = path.read_text(encoding="utf-8", errors="replace")
            text = re.sub(r"(?i)(signed-by\s*[=:]\s*)/(?=(etc|usr)/)", rf"\1{root}/", text)
            if mirror:
                text = re.sub(r"(?m)^(deb\s+(?:\[[^\]]*\]\s+)?)\S+", rf"\1{mirror}", text)
                text = re.sub(r"(?m)^(URIs:\s*).*$", rf"\1{mirror}", text)
            path.write_text(text, encoding="utf-8")
    return listed[0]


def _run(command: list[str], what: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_APT_S, check=False, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as error:
        raise ProvisionError(f"{what}: no end after {_APT_S:.0f} s") from error
    if done.returncode != 0:
        errors = [line for line in (done.stderr + done.stdout).splitlines() if line.startswith("E:")] or done.stderr.splitlines()[-3:]
        raise ProvisionError(f"{what}: " + "\n".join(errors[-4:]), todo="name a mirror that this machine reaches: --apt-mirror URL")
