"""Python wheels for another machine: uv resolves them for its Python and glibc, and they are fetched here by checksum.

For bundles, images and the uv that hosts are given. Where packages come from is what this machine's pip is set up for.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

import uv
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from provision.base import aptsources, downloads, paths, uv_support
from provision.base.downloads import Say
from provision.base.errors import ProvisionError
from provision.base.text import duration
from provision.plan.lock import LockedFile

_UV_S = 600.0
#: The releases of glibc that uv has a platform for.
_GLIBCS = (17, 28, *range(31, 41))
_HINT = "name an index that has them: --index-url, --wheels"


@dataclass(frozen=True)
class Platform:
    """The machine that wheels are for: its Python (``3.11``), architecture, and glibc (``2.36``)."""

    python: str
    arch: str
    glibc: str

    @property
    def _glibc_minor(self) -> int:
        return int(self.glibc.split(".")[1])

    @property
    def uv_name(self) -> str:
        """The newest platform of uv whose wheels it runs. Raises ProvisionError where its glibc is too old for any."""
        fitting = [release for release in _GLIBCS if release <= self._glibc_minor]
        if not fitting:
            raise ProvisionError(f"no wheels are made for glibc {self.glibc}", hint="2.17 is the oldest")
        return f"{self.arch}-manylinux_2_{fitting[-1]}"

    def tags(self) -> list[Tag]:
        """The tags of wheels that it runs, best first."""
        platforms = [f"manylinux_2_{number}_{self.arch}" for number in range(self._glibc_minor, 4, -1)]
        platforms += [f"manylinux{old}_{self.arch}" for old in ("2014", "2010", "1")] + [f"linux_{self.arch}"]
        major, minor = (int(part) for part in self.python.split(".")[:2])
        return [*cpython_tags((major, minor), platforms=platforms), *compatible_tags((major, minor), f"cp{major}{minor}", platforms)]


@dataclass(frozen=True)
class Indexes:
    """Where this run looks, in addition to what pip is set up for.

    Attributes:
        index_url: replaces pip's index.
        torch_index: for PyTorch, unless a folder on this machine has it: uv fails where an index does not answer.
        find_links: a folder of wheels.
    """

    index_url: str | None = None
    torch_index: str | None = None
    find_links: Path | None = None


@dataclass(frozen=True)
class WheelFile:
    """A wheel: its package, the file's name, where it is, and its SHA-256."""

    name: str
    version: str
    file: str
    url: str
    sha256: str


Locked = LockedFile | WheelFile


def gather(
    pins: Iterable[str], platform: Platform, folder: Path, indexes: Indexes, locked: Sequence[Locked] = (), *, say: Say
) -> list[WheelFile]:
    """Put ``pins`` and what they depend on into ``folder``; returns the files, by name.

    Args:
        locked: the files that provision.lock has: of these packages nothing else is taken.

    Raises:
        ProvisionError: no wheels fit, cannot be fetched, or are not the locked ones.
    """
    wanted = sorted(pins)
    say(f"wheels for Python {platform.python} on {platform.arch}: {', '.join(wanted)}")
    pip = uv_support.pip_settings(os.environ, sys.prefix)
    folders = [str(indexes.find_links)] if indexes.find_links else []
    needs_index = _needs_torch_index(wanted, platform, [*folders, *pip.get("find-links", "").split()])
    setup = uv_support.online(pip, indexes.index_url, indexes.torch_index if needs_index else None, next(iter(folders), None))
    versions = sorted({f"{entry.name}=={entry.version}" for entry in locked})
    text = _resolve(wanted, versions, platform, setup)
    found = _choose(text, platform, locked)
    folder.mkdir(parents=True, exist_ok=True)
    for wheel in found:
        downloads.link_or_copy(_fetch(wheel, setup, say), folder / wheel.file)
    return found


def _needs_torch_index(pins: Sequence[str], platform: Platform, folders: Sequence[str]) -> bool:
    """Whether PyTorch is among the pins, and no folder on this machine has that wheel."""
    versions = {pin.partition("==")[2] for pin in pins if pin.startswith("torch==")}
    tags = set(platform.tags())
    for path in (path for folder in folders for path in Path(folder.removeprefix("file://")).glob("torch-*.whl")):
        with contextlib.suppress(InvalidWheelFilename):
            _name, version, _build, fits = parse_wheel_filename(path.name)
            if str(version) in versions and fits & tags:
                return False
    return bool(versions)


def _resolve(pins: Sequence[str], versions: Sequence[str], platform: Platform, setup: uv_support.Setup) -> str:
    """The pylock.toml to which uv resolves ``pins``, at these versions where it takes them."""
    with tempfile.TemporaryDirectory(prefix="provision-uv-") as name:
        work = Path(name)
        (work / "pins.txt").write_text("".join(f"{pin}\n" for pin in pins), encoding="utf-8")
        (work / "versions.txt").write_text("".join(f"{pin}\n" for pin in versions), encoding="utf-8")
        words = ["--constraints", "versions.txt", "--format", "pylock.toml", "-o", "pylock.toml", "pins.txt"]
        compile_requirements(words, platform, work, setup, f"found no wheels for {', '.join(pins)}", _HINT)
        return (work / "pylock.toml").read_text(encoding="utf-8")


def compile_requirements(words: Sequence[str], platform: Platform, work: Path, setup: uv_support.Setup, failed: str, hint: str) -> None:
    """Let uv resolve requirements to wheels for another machine; no source is built.

    Args:
        words: of the command line, with paths below ``work``, where it runs. Settings are on no command line, as they may hold passwords.
        failed: what to say before uv's own words where it finds none.

    Raises:
        ProvisionError: uv found none, or did not end in time.
    """
    command = ["pip", "compile", "--only-binary", ":all:", "--generate-hashes"]
    command += ["--python", sys.executable, "--python-version", platform.python, "--python-platform", platform.uv_name]
    command += [word for path in setup.constraints for word in ("--constraints", path)]
    run_uv([*command, *words], work, setup, failed, hint)


def run_uv(words: Sequence[str], work: Path, setup: uv_support.Setup, failed: str, hint: str) -> str:
    """Run uv in the folder ``work`` and return what it prints. Raises ProvisionError as `compile_requirements` does."""
    uv_support.write_settings(str(work / "uv.toml"), setup.settings)
    kept = paths.cache() / "uv"
    kept.mkdir(parents=True, exist_ok=True, mode=0o700)  # every user could take the lock that uv makes in it
    own = {"UV_CONFIG_FILE": str(work / "uv.toml"), "UV_CACHE_DIR": str(kept), "NO_COLOR": "1"}
    try:
        done = subprocess.run(
            [uv.find_uv_bin(), *words, "--quiet", "--no-progress"],
            cwd=work,
            env={**os.environ, **setup.variables, **own},
            capture_output=True,
            text=True,
            timeout=_UV_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ProvisionError(f"uv did not finish in {duration(_UV_S)}", hint="look at the network, then run it again") from error
    finally:
        (work / "uv.toml").unlink()
    if done.returncode != 0:
        output = aptsources.without_logins(done.stderr.strip() or done.stdout.strip())
        raise ProvisionError(f"uv {failed}:\n{output}", hint=hint)
    return done.stdout


def _choose(text: str, platform: Platform, locked: Sequence[Locked]) -> list[WheelFile]:
    """Of each package in a pylock.toml the wheel that fits the platform best, among those that the lock has."""
    allowed: dict[str, set[str]] = {}
    for entry in locked:
        allowed.setdefault(uv_support.canonical(entry.name), set()).add(entry.sha256 or "")
    ranks = {tag: rank for rank, tag in enumerate(platform.tags())}
    found, wrong = [], []
    for name, version, wheels in uv_support.parse_pylock(text):
        files = {sha256: Path(unquote(urlsplit(url).path)).name for sha256, url in wheels.items()}
        fitting = {
            sha256: min(ranks[tag] for tag in tags & ranks.keys())
            for sha256, file in files.items()
            if (tags := parse_wheel_filename(file)[3]) & ranks.keys() and sha256 in allowed.get(name, files)
        }
        if fitting:
            best = min(fitting, key=lambda sha256: (fitting[sha256], files[sha256]))
            found.append(WheelFile(name, version, files[best], wheels[best], best))
        else:
            have, need = (" or ".join(sorted(each)) or "(unknown)" for each in (files, allowed.get(name, ())))
            wrong.append(f"{name} {version} has checksum {have}, but provision.lock says {need}")
    if wrong:
        raise ProvisionError("\n".join(wrong), hint="if the index has a new file on purpose, take it with --upgrade")
    return found


def _fetch(wheel: WheelFile, setup: uv_support.Setup, say: Say) -> Path:
    """The file of a wheel, checked: where it is on this machine, else in the cache."""
    if (path := downloads.local_path(wheel.url)) is not None:
        return downloads.check_user_file(path, wheel.sha256, what=f"the wheel of {wheel.name} {wheel.version}")
    opener = downloads.index_opener(wheel.url, setup)
    return downloads.fetch(wheel.url, wheel.sha256, what=wheel.file, hint=_HINT, say=say, opener=opener)
